"""Calls like ones that were checked before are not checked again, but for what can differ: addresses and numbers.

Serving makes the same call thousands of times with other addresses, lengths and scales. Everything that the checks and
the backend's refusals look at is put into one hashable `kind`; a kind that passed once passes again. Only backends that
say so (`refuses_by_kind = True`) are remembered, and under "auto" only if those asked before say so, too: their
`why_not` depends on the kind alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from mla import checks, registry
from mla.backend import Backend
from mla.memory import span
from mla.problem import Problem

MOST = 4096  # kinds; then all are forgotten and checked anew

_Tensor = torch.Tensor
_seen: dict[Hashable, _Seen] = {}


@dataclass(frozen=True, slots=True)
class _Seen:
    """What became of a kind of call."""

    backend: Backend
    problem: Problem  # without tensors: the fields that the kind fixes
    reach: tuple[int, ...]  # bytes from the first to past the last, of the tensors in `_ranges`' order
    squeeze: bool  # the cache came as [N, 1, P, D]


def kind_of(
    query: Any, kv_cache: Any, workspace: Any, nope: Any, rank: Any, rope: Any, tables: Any, lens: Any, bound: Any,
    top_k: Any, out: Any, scale1: Any, scale2: Any, sinks: Any, pdl: Any, backend: Any, return_lse: Any, lse: Any,
    base: Any, deterministic: Any,
) -> Hashable:  # fmt: skip
    """All that is static about the call, or None for one that the quick way does not know how to describe."""
    if not (type(query) is type(kv_cache) is type(tables) is type(lens) is _Tensor and type(bound) is int):
        return None
    if type(backend) is not str or not (base is None or type(base) is str):
        return None
    if type(sinks) is _Tensor and sinks.dtype is not torch.float32:  # they are cast: `find` would see other memory
        return None
    kind = [
        query.shape, query.stride(), query.dtype, query.device, kv_cache.shape, kv_cache.stride(), kv_cache.dtype,
        kv_cache.device, tables.shape, tables.stride(), tables.dtype, tables.device, lens.shape, lens.stride(),
        lens.dtype, lens.device, nope, rank, rope, top_k, pdl, backend, return_lse, base, deterministic,
        registry.generation(),
    ]  # fmt: skip
    for given in (workspace, out, lse, sinks, scale1, scale2):
        if type(given) is _Tensor:
            kind += (given.shape, given.stride(), given.dtype, given.device, given.layout, given.requires_grad)
        elif given is None or type(given) is float:
            kind.append(type(given))
        else:
            return None
    # 1, 1.0 and True are equal to each other and would be taken for one another.
    if not (type(nope) is type(rank) is type(rope) is type(top_k) is int):
        return None
    if not (type(return_lse) is type(deterministic) is bool and (pdl is None or type(pdl) is bool)):
        return None
    return tuple(kind)


def find(kind: Hashable, *arguments: Any) -> tuple[Problem, Backend] | None:
    """The problem and its backend, for a kind that was kept; the arguments as those of `kind_of`."""
    seen = _seen.get(kind)
    if seen is None:
        return None
    (query, cache, workspace, _, _, _, tables, lens, bound, _, out, scale1, scale2, sinks, *_, lse, _, _) = arguments
    if bound < 0:
        return None
    like = seen.problem
    if seen.squeeze:
        cache = cache.squeeze(1)
    scale1 = checks.scale("bmm1_scale", scale1, like.device)
    scale2 = checks.scale("bmm2_scale", scale2, like.device)
    if sinks is not None:
        sinks = sinks.detach().to(torch.float32)
    if out is not None or lse is not None:
        if not _apart((out, lse), (query, cache, tables, lens, sinks, scale1, scale2), seen.reach):
            return None
        rows = (like.batch, like.q_len, like.num_heads)
        out_view = None if out is None else out if out.ndim == 4 else out.unsqueeze(1)
        lse_view = None if lse is None else lse if lse.ndim == 3 else checks.lse(lse, *rows)
    else:
        out_view = lse_view = None
    problem = Problem(
        query, cache, tables, lens, bound, like.top_k, scale1, scale2, sinks, workspace, out_view, lse_view,
        like.out_dtype, like.wants_lse, like.lse_base, like.enable_pdl, like.deterministic, like.qk_nope_head_dim,
        like.kv_lora_rank, like.qk_rope_head_dim, like.batch, like.q_len, like.num_heads, like.num_pages,
        like.page_size, like.device, like.capability, kind,
    )  # fmt: skip
    return problem, seen.backend


def keep(kind: Hashable, problem: Problem, backend: Backend) -> None:
    """Remember that calls of this kind are legal and that this backend runs them."""
    p, nothing = problem, torch.empty(0)
    written = (p.out, p.lse)
    read = (p.query, p.kv_cache, p.block_tables, p.seq_lens, p.sinks, p.bmm1_scale, p.bmm2_scale)
    like = Problem(
        nothing, nothing, nothing, nothing, 0, p.top_k, 0.0, 0.0, None, None, None, None, p.out_dtype, p.wants_lse,
        p.lse_base, p.enable_pdl, p.deterministic, p.qk_nope_head_dim, p.kv_lora_rank, p.qk_rope_head_dim, p.batch,
        p.q_len, p.num_heads, p.num_pages, p.page_size, p.device, p.capability,
    )  # fmt: skip
    if len(_seen) >= MOST:
        _seen.clear()
    _seen[kind] = _Seen(backend, like, tuple(map(_reach, (*written, *read))), squeeze=len(_shape_of_cache(kind)) == 4)


def _shape_of_cache(kind: Hashable) -> torch.Size:
    assert isinstance(kind, tuple)
    shape: torch.Size = kind[4]
    return shape


def _reach(value: object) -> int:
    if not isinstance(value, _Tensor):
        return 0
    first, end = span(value)
    return end - first


def _apart(written: tuple[Any, ...], read: tuple[Any, ...], reach: tuple[int, ...]) -> bool:
    """Whether no address range of what is written meets another's; if one does, the exact check decides."""
    ranges = [
        (value.data_ptr(), value.data_ptr() + length)
        for value, length in zip((*written, *read), reach, strict=True)
        if length and isinstance(value, _Tensor)
    ]
    outputs = sum(1 for value, length in zip(written, reach, strict=False) if length and isinstance(value, _Tensor))
    return all(
        end <= other or other_end <= first
        for index, (first, end) in enumerate(ranges[:outputs])
        for other, other_end in ranges[index + 1 :]
    )
