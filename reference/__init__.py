"""The contract executed in pure PyTorch: what every backend is held to.

* `decode_literal` reads like the formulas: loops over requests, tokens and heads, one key list at a time.
* `decode` computes the same for all heads of a query token at once, in blocks of keys: what `backend="reference"` runs.

Both take a `mla.Problem`, compute in float32 or float64, and return unrounded results.
"""

if __name__ != "mla.reference":
    raise ImportError(f"import mla.reference, not {__name__}: a second copy would be a second registry")

from mla.reference.batched import decode
from mla.reference.literal import decode_literal
from mla.reference.runner import ReferenceBackend, backend

__all__ = ["ReferenceBackend", "backend", "decode", "decode_literal"]
