"""The static checks of one call: one function per parameter, shapes and dtypes only, nothing read from a device.

Every message names the parameter, what was received and what was expected. ValueError for shapes, ranks, sizes and
devices, TypeError for dtypes and kinds.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING

import torch

from mla.memory import overlaps, overlaps_itself, span

if TYPE_CHECKING:
    from mla.problem import LseBase

E4M3 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)  # the reference only

DTYPE_PAIRS: frozenset[tuple[torch.dtype, torch.dtype]] = frozenset(
    [(dtype, dtype) for dtype in (*HALVES, E4M3, *WIDE)] + [(dtype, E4M3) for dtype in HALVES]
)
"""The (query dtype, cache dtype) pairs that the contract allows."""

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
LATENT_DIMS = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
PACKED_FP8_ROW = 656  # bytes of another project's row: 512 e4m3, 4 fp32 scales, 64 bf16


def short(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(short(dtype) for dtype in dtypes)


def shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def tensor(name: str, value: object, expected: str) -> torch.Tensor:
    """`value` as a dense torch.Tensor, or a TypeError that names the parameter."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a torch.Tensor, {expected}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; expected a strided (dense) torch.Tensor, {expected}")
    return value


def count(name: str, value: object) -> int:
    """A non-negative Python int (anything with __index__ but bool and tensors, which would cost a host sync)."""
    number = integer(name, value)
    if number < 0:
        raise ValueError(f"{name} is {number}; expected an int >= 0")
    return number


def integer(name: str, value: object) -> int:
    if isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__"):
        hint = " (reading it from a tensor would wait for the device)" if isinstance(value, torch.Tensor) else ""
        raise TypeError(f"{name} is a {type(value).__name__}; expected an int{hint}")
    return operator.index(value)


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a bool")


def latent_dims(qk_nope_head_dim: object, kv_lora_rank: object, qk_rope_head_dim: object) -> tuple[int, int, int]:
    received = {
        "qk_nope_head_dim": integer("qk_nope_head_dim", qk_nope_head_dim),
        "kv_lora_rank": integer("kv_lora_rank", kv_lora_rank),
        "qk_rope_head_dim": integer("qk_rope_head_dim", qk_rope_head_dim),
    }
    for name, expected in LATENT_DIMS.items():
        if received[name] != expected:
            raise ValueError(f"{name} is {received[name]}; expected {expected}")
    return received["qk_nope_head_dim"], received["kv_lora_rank"], received["qk_rope_head_dim"]


def query(value: object, rank: int, rope: int) -> tuple[int, int, int]:
    """Check `query`; return (B, Q, H)."""
    width = rank + rope
    expected = f"[B, Q, H, {width}]"
    q = tensor("query", value, expected)
    if q.dtype not in (*HALVES, E4M3, *WIDE):
        raise TypeError(
            f"query has dtype {short(q.dtype)}; expected {names((*HALVES, E4M3))} "
            "(float32 or float64 for the reference)"
        )
    if q.ndim != 4:
        hint = f"; for one token per request pass query.unsqueeze(1), [{q.shape[0]}, 1, ...]" if q.ndim == 3 else ""
        raise ValueError(f"query has shape {shape(q)}, {q.ndim} dimensions; expected {expected}{hint}")
    batch, q_len, heads, last = q.shape
    if last != width:
        raise ValueError(
            f"query has shape {shape(q)}, last dimension {last}; expected {expected} = kv_lora_rank + qk_rope_head_dim"
        )
    if heads < 1:
        raise ValueError(f"query has shape {shape(q)}, no heads; expected {expected} with H >= 1")
    last_stride_one("query", q)
    return batch, q_len, heads


def last_stride_one(name: str, value: torch.Tensor) -> None:
    if value.stride(-1) != 1 and value.numel() > 0:
        raise ValueError(
            f"{name} has strides {list(value.stride())}; expected a last stride of 1 (other strides are honoured)"
        )


def kv_cache(value: object, rank: int, rope: int) -> torch.Tensor:
    """Check `kv_cache`; return it as a [N, P, D] view."""
    width = rank + rope
    expected = f"[N, P, {width}] or [N, 1, P, {width}]"
    kv = tensor("kv_cache", value, expected)
    if kv.ndim not in (3, 4):
        raise ValueError(f"kv_cache has shape {shape(kv)}, {kv.ndim} dimensions; expected {expected}")
    if kv.shape[-1] != width:
        packed = "; packed rows of 656 bytes (e4m3 latents with their own scales) are not supported"
        hint = packed if kv.shape[-1] == PACKED_FP8_ROW else ""
        raise ValueError(f"kv_cache has shape {shape(kv)}, last dimension {kv.shape[-1]}; expected {expected}{hint}")
    if kv.ndim == 4:
        if kv.shape[1] != 1:
            raise ValueError(
                f"kv_cache has shape {shape(kv)}; expected {expected}: one latent per token is shared by all heads"
            )
        kv = kv.squeeze(1)
    if kv.shape[1] < 1:
        raise ValueError(f"kv_cache has shape {shape(kv)}, page size {kv.shape[1]}; expected {expected} with P >= 1")
    last_stride_one("kv_cache", kv)
    return kv


def dtype_pair(q: torch.Tensor, kv: torch.Tensor) -> None:
    if (q.dtype, kv.dtype) in DTYPE_PAIRS:
        return
    hint = ""
    if kv.dtype in (torch.uint8, torch.int8):
        hint = "; bytes carry no format: if they hold e4m3, pass kv_cache.view(torch.float8_e4m3fn)"
    raise TypeError(
        f"query has dtype {short(q.dtype)} and kv_cache {short(kv.dtype)}; expected equal dtypes "
        f"({names((*HALVES, E4M3))}; float32 or float64 for the reference) or a bfloat16 or float16 query with a "
        f"float8_e4m3fn cache{hint}"
    )


def block_tables(value: object, batch: int, q_len: int, top_k: int) -> None:
    mode = f"sparse (sparse_mla_top_k={top_k})" if top_k else "dense (sparse_mla_top_k=0)"
    expected = f"[B, Q, K] = [{batch}, {q_len}, {top_k}]" if top_k else f"[B, W] = [{batch}, W]"
    table = tensor("block_tables", value, expected)
    if table.dtype not in INDEX_DTYPES:
        raise TypeError(f"block_tables has dtype {short(table.dtype)}; expected {names(INDEX_DTYPES)}")
    wrong = tuple(table.shape) != (batch, q_len, top_k) if top_k else table.ndim != 2 or table.shape[0] != batch
    if wrong:
        raise ValueError(f"block_tables has shape {shape(table)}; expected {expected}, since the call is {mode}")


def seq_lens(value: object, batch: int) -> None:
    lengths = tensor("seq_lens", value, f"[B] = [{batch}]")
    if lengths.dtype not in INDEX_DTYPES:
        raise TypeError(f"seq_lens has dtype {short(lengths.dtype)}; expected {names(INDEX_DTYPES)}")
    if tuple(lengths.shape) != (batch,):
        raise ValueError(f"seq_lens has shape {shape(lengths)}; expected [B] = [{batch}], one length per request")


def scale(name: str, value: object, device: torch.device) -> float | torch.Tensor:
    """A finite number, rounded to fp32 so that it means the same as its tensor form, or the fp32 tensor itself."""
    expected = "expected a float or a float32 tensor of 1 element on the query's device"
    if isinstance(value, torch.Tensor):
        if value.dtype is not torch.float32:
            raise TypeError(f"{name} is a tensor of dtype {short(value.dtype)}; {expected}")
        if value.numel() != 1:
            raise ValueError(f"{name} is a tensor of shape {shape(value)}, {value.numel()} elements; {expected}")
        same_device(device, **{name: value})
        return value.detach().reshape(())
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is a {type(value).__name__}; {expected}")
    number = float(value)
    if not math.isfinite(number) or abs(number) > torch.finfo(torch.float32).max:
        raise ValueError(f"{name} is {number}; expected a number that is finite in float32")
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def sinks(value: object, heads: int) -> torch.Tensor | None:
    """Check `sinks` and take it out of its list; its dtype may still be another float than fp32."""
    expected = f"a float32 tensor of shape [H] = [{heads}], or a list or tuple that holds exactly one"
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise ValueError(f"sinks is a {type(value).__name__} of {len(value)}; expected {expected}")
        value = value[0]
    sink = tensor("sinks", value, expected)
    if not sink.is_floating_point():
        raise TypeError(f"sinks has dtype {short(sink.dtype)}; expected {expected} (other floats are cast)")
    if tuple(sink.shape) != (heads,):
        raise ValueError(f"sinks has shape {shape(sink)}; expected {expected}")
    return sink


def workspace(value: object) -> None:
    if value is None:
        return
    scratch = tensor("workspace_buffer", value, "of any dtype, or None")
    if not scratch.is_contiguous():
        raise ValueError(
            f"workspace_buffer has strides {list(scratch.stride())} for shape {shape(scratch)}; expected a contiguous "
            "tensor, since it is used as bytes"
        )


def out(value: object, batch: int, q_len: int, heads: int, rank: int) -> torch.Tensor | None:
    """Check `out`; return it as a [B, Q, H, R] view."""
    if value is None:
        return None
    expected = f"[B, Q, H, {rank}] = [{batch}, {q_len}, {heads}, {rank}]"
    if q_len == 1:
        expected += f" or [B, H, {rank}] = [{batch}, {heads}, {rank}]"
    result = tensor("out", value, expected)
    if result.dtype not in OUT_DTYPES:
        raise TypeError(f"out has dtype {short(result.dtype)}; expected {names(OUT_DTYPES)}")
    if q_len == 1 and tuple(result.shape) == (batch, heads, rank):
        result = result.unsqueeze(1)
    if tuple(result.shape) != (batch, q_len, heads, rank):
        raise ValueError(f"out has shape {shape(result)}; expected {expected}")
    last_stride_one("out", result)
    return result


def lse(value: object, batch: int, q_len: int, heads: int) -> torch.Tensor | None:
    """Check `lse`; return it as a [B, Q, H] view. Any strides are honoured."""
    if value is None:
        return None
    expected = f"[B*Q, H] = [{batch * q_len}, {heads}] or [B, Q, H] = [{batch}, {q_len}, {heads}]"
    result = tensor("lse", value, expected)
    if result.dtype is not torch.float32:
        raise TypeError(f"lse has dtype {short(result.dtype)}; expected float32")
    if tuple(result.shape) == (batch * q_len, heads):
        row, head = result.stride()
        return result.as_strided((batch, q_len, heads), (q_len * row, row, head))
    if tuple(result.shape) != (batch, q_len, heads):
        raise ValueError(f"lse has shape {shape(result)}; expected {expected}")
    return result


def lse_base(name: str, value: object) -> LseBase:
    if value is None or value == "base2":
        return "base2"
    if value == "basee":
        return "basee"
    if not isinstance(value, str):
        raise TypeError(f"return_lse_base is a {type(value).__name__}; expected 'base2', 'basee' or None (base2)")
    raise ValueError(f"{name} is {value!r}; expected 'base2', 'basee' or None (base2)")


def same_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    for name, value in tensors.items():
        if value is not None and value.device != device:
            raise ValueError(f"{name} is on {value.device}; expected {device}, the device of query")


def no_overlap(outputs: Mapping[str, torch.Tensor | None], inputs: Mapping[str, object]) -> None:
    """What is written must be its own memory: no element twice, none shared with an input or with each other."""
    written = {name: value for name, value in outputs.items() if value is not None}
    if not written:
        return
    others = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)} | written
    spans = {name: span(value) for name, value in others.items()}
    for name, value in written.items():
        if overlaps_itself(value):
            raise ValueError(
                f"{name} has strides {list(value.stride())} for shape {shape(value)}, so elements share memory; "
                "expected a buffer in which each element has its own"
            )
        first, end = spans[name]
        for other, (other_first, other_end) in spans.items():
            # The exact comparison is for the rare case that address ranges meet, as in views of one buffer.
            if first < other_end and other_first < end and other != name and overlaps(value, others[other]):
                raise ValueError(f"{name} shares memory with {other}; expected a buffer of its own")
