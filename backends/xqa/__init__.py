"""backend="xqa": Numba CUDA kernels on mma.sync, made for sm_120."""

from mla.announced import AnnouncedBackend

backend = AnnouncedBackend("xqa", "this version of mla does not contain its Numba CUDA kernels yet")
