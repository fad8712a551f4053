"""The kernels, one folder per backend; each imports its own toolchain, and none imports another.

`mla.backends` is also a function: `mla.backends()` lists every known backend.
"""

if __name__ != "mla.backends":
    raise ImportError(f"import mla.backends, not {__name__}: a second copy would be a second registry")

import sys
from types import ModuleType

from mla.registry import BackendInfo
from mla.registry import backends as _list_backends


class _CallableModule(ModuleType):
    def __call__(self) -> dict[str, BackendInfo]:
        return _list_backends()


_CallableModule.__call__.__doc__ = _list_backends.__doc__
sys.modules[__name__].__class__ = _CallableModule
