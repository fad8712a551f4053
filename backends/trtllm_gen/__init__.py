"""backend="trtllm-gen": Triton kernels, made for sm_100 and sm_103, for every NVIDIA GPU from sm_80 on."""

from mla.backends.trtllm_gen.backend import TritonBackend

backend = TritonBackend()
