"""MLA decode attention for everyone: one call, one meaning, several backends.

`trtllm_batch_decode_with_kv_cache_mla` is the call, `explain` says where it would run and why, `backends()` lists what
there is. Importing this needs PyTorch alone and starts no GPU.
"""

from typing import TYPE_CHECKING

from mla.backend import Backend
from mla.cache import append_tokens, quantize_e4m3
from mla.capabilities import Capabilities
from mla.decode import explain, trtllm_batch_decode_with_kv_cache_mla, warmup
from mla.dispatch import Explanation, Verdict
from mla.errors import BackendBroken, BackendPluginWarning, BackendUnsupported, ReferenceFallbackWarning
from mla.merge import merge_state, merge_states
from mla.problem import Problem
from mla.registry import BackendInfo, register_backend
from mla.strict import check_values, strict

if TYPE_CHECKING:
    from mla.registry import backends  # a type checker sees one of the two things that this name is
else:
    import mla.backends  # the package, which can be called: `mla.backends()`

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BackendBroken",
    "BackendInfo",
    "BackendPluginWarning",
    "BackendUnsupported",
    "Capabilities",
    "Explanation",
    "Problem",
    "ReferenceFallbackWarning",
    "Verdict",
    "append_tokens",
    "backends",
    "check_values",
    "explain",
    "merge_state",
    "merge_states",
    "quantize_e4m3",
    "register_backend",
    "strict",
    "trtllm_batch_decode_with_kv_cache_mla",
    "warmup",
]
