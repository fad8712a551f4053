"""backend="trtllm-gen": Triton kernels, made for sm_100 and sm_103."""

from mla.announced import AnnouncedBackend

backend = AnnouncedBackend("trtllm-gen", "this version of mla does not contain its Triton kernels yet")
