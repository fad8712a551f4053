"""Calls like ones that were checked before are not checked again, but for what can differ: addresses and numbers.

Serving makes the same call thousands of times with other addresses, lengths and scales. Everything that the checks and
the backend's refusals look at is put into one hashable `kind`; a kind that passed once passes again. Only backends that
have a `bind` are remembered: by it they say that their `why_not` depends on the kind alone. Under "auto" those asked
before must have one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from mla import checks, registry
from mla.backend import Backend
from mla.memory import span
from mla.problem import Problem

MOST = 4096  # kinds; then all are forgotten and checked anew

_Tensor = torch.Tensor
_seen: dict[Hashable, Seen] = {}


class _UnknownError(Exception):
    """An argument that the quick way does not know how to describe."""


def _of(value: Any) -> Hashable:
    if type(value) is not _Tensor:
        raise _UnknownError
    return value.shape, value.stride(), value.dtype, value.device, value.layout, value.requires_grad


def kind_of(
    query: Any, kv_cache: Any, workspace: Any, nope: Any, rank: Any, rope: Any, tables: Any, lens: Any, bound: Any,
    top_k: Any, out: Any, scale1: Any, scale2: Any, sinks: Any, pdl: Any, backend: Any, return_lse: Any, lse: Any,
    base: Any, deterministic: Any,
) -> Hashable:  # fmt: skip
    """All that is static about the call, or None for one that the quick way does not know how to describe."""
    if not (
        type(query) is type(kv_cache) is type(tables) is type(lens) is _Tensor
        # 1, 1.0 and True are equal to each other and would be taken for one another.
        and type(nope) is type(rank) is type(rope) is type(top_k) is type(bound) is int
        and type(return_lse) is type(deterministic) is bool
        and (pdl is None or type(pdl) is bool)
        and type(backend) is str
        and (base is None or type(base) is str)
        and bound >= 0
        # Other sinks are cast: what is written would be compared with the copy.
        and (sinks is None or (type(sinks) is _Tensor and sinks.dtype is torch.float32))
    ):
        return None
    try:
        return (
            query.shape, query.stride(), query.dtype, query.device, kv_cache.shape, kv_cache.stride(), kv_cache.dtype,
            kv_cache.device, tables.shape, tables.stride(), tables.dtype, tables.device, lens.shape, lens.stride(),
            lens.dtype, lens.device, nope, rank, rope, top_k, pdl, backend, return_lse, base, deterministic,
            registry.generation(), workspace if workspace is None else _of(workspace), out if out is None else _of(out),
            lse if lse is None else _of(lse), sinks if sinks is None else _of(sinks),
            float if type(scale1) is float else _of(scale1), float if type(scale2) is float else _of(scale2),
        )  # fmt: skip
    except _UnknownError:
        return None


class Seen:
    """A kind of call that is legal, and whose backend is chosen and bound: what is left to do for the next one."""

    def __init__(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None, run: Callable[..., None]) -> None:
        p = problem
        self.run = run
        self.device, self.out_dtype = p.device, p.out_dtype
        self.rows = (p.batch, p.q_len, p.num_heads)
        self.out_shape = (*self.rows, p.kv_lora_rank)
        self.wants_lse = p.wants_lse
        self.lse_strides = None if p.lse is None else p.lse.stride()
        read = (p.query, p.kv_cache, p.block_tables, p.seq_lens, p.sinks, p.bmm1_scale, p.bmm2_scale)
        self.reach = tuple(map(_reach, (p.out, p.lse, *read)))
        self.scales: tuple[Any, Any, Any, Any] = (None, None, None, None)

    def call(
        self, query: Any, cache: Any, workspace: Any, tables: Any, lens: Any, bound: int, out: Any, scale1: Any,
        scale2: Any, sinks: Any, return_lse: bool, lse: Any,
    ) -> Any:  # fmt: skip
        """The result of the call, or None when it needs the full checks after all."""
        given1, given2, *scales = self.scales
        if given1 is not scale1 or given2 is not scale2:  # a float object that was checked is good again
            scales = [checks.scale("bmm1_scale", scale1, self.device), checks.scale("bmm2_scale", scale2, self.device)]
            if type(scale1) is type(scale2) is float:
                self.scales = (scale1, scale2, *scales)
        if cache.ndim == 4:
            cache = cache.squeeze(1)
        if sinks is not None:
            sinks = sinks.detach()
        if (out is not None or lse is not None) and not self._apart(
            out, lse, query, cache, tables, lens, sinks, *scales
        ):
            return None
        result, result_lse = out, lse
        if out is None:
            out = result = torch.empty(self.out_shape, dtype=self.out_dtype, device=self.device)
        elif out.ndim == 3:
            out = out.unsqueeze(1)
        if self.wants_lse:
            if lse is None:
                result_lse = torch.empty(
                    (self.rows[0] * self.rows[1], self.rows[2]), dtype=torch.float32, device=self.device
                )
                lse = result_lse.view(self.rows)
            elif lse.ndim == 2:
                lse = lse.as_strided(self.rows, self.lse_strides)
        self.run(query, cache, tables, lens, out, lse, sinks, scales[0], scales[1], workspace, bound)
        return (result, result_lse) if return_lse else result

    def _apart(self, *tensors: Any) -> bool:
        """Whether no address range of the first two, which are written, meets another; else the exact check decides."""
        ranges: list[tuple[int, int]] = []  # of what is written
        for index, length in enumerate(self.reach):
            if length:
                first = tensors[index].data_ptr()
                end = first + length
                for other, other_end in ranges:
                    if first < other_end and other < end:
                        return False
                if index < 2:
                    ranges.append((first, end))
        return True


def _reach(value: object) -> int:
    """Bytes from the first to past the last that a tensor can reach; 0 for what is no tensor."""
    if not isinstance(value, _Tensor):
        return 0
    first, end = span(value)
    return end - first


def find(kind: Hashable) -> Seen | None:
    """What is known of a kind of call."""
    return None if kind is None else _seen.get(kind)


def keep(kind: Hashable, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None, backend: Backend) -> None:
    """Remember that calls of this kind are legal and that this backend has run one."""
    bind: Callable[..., Callable[..., None]] = backend.bind  # type: ignore[attr-defined]  # an optional part
    if len(_seen) >= MOST:
        _seen.clear()
    _seen[kind] = Seen(problem, out, lse, bind(problem, out, lse))
