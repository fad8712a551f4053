"""Traces: of one call in the next, in the inputs, and of whoever used the workspace before."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mla.problem import Problem
from mla.testing.case import Case
from mla.testing.emulate import LOG2E, Kernel, State
from mla.testing.faults.fault import planted
from mla.testing.faults.raw import Careless
from mla.testing.judges import second_call_is_right, visible_nan_stays_in_its_rows

_planted = partial(planted, "traces")


def _shapes(arguments: dict[str, Any]) -> Hashable:
    return tuple((name, tuple(a.shape), a.dtype) for name, a in arguments.items() if isinstance(a, torch.Tensor))


@_planted(
    "result-of-the-first-call-kept",
    "A second call with tensors of the same shapes gives the result of the first.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, out="bfloat16", lse="none"),
    judge=second_call_is_right,
)
@dataclass
class FirstResultKept(Kernel):
    known: dict[Hashable, list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result = super().__call__(**arguments)
        parts = result if isinstance(result, tuple) else (result,)
        kept = self.known.setdefault(_shapes(arguments), [part.clone() for part in parts])
        for part, first in zip(parts, kept, strict=True):
            part.copy_(first)
        return result


@_planted(
    "table-of-the-first-call-kept",
    "The block table is copied in the first call, and a later one of the same shapes does not look at its own.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(20,), q_len=2, heads=2, page_size=4, top_k=6),
    judge=second_call_is_right,
)
@dataclass
class FirstTableKept(Careless):
    known: dict[Hashable, torch.Tensor] = field(default_factory=dict)

    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        table = arguments["block_tables"]
        arguments["block_tables"] = self.known.setdefault(_shapes(arguments), table.clone())
        return super().__call__(**arguments)


@_planted(
    "query-scaled-in-place",
    "The query is multiplied by bmm1 where it lies.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, query="float8_e4m3fn", cache="float8_e4m3fn"),
    needs=("bmm1 not 1",),
)
class QueryScaled(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result = super().__call__(**arguments)
        query = arguments["query"]
        query.copy_((query.to(torch.float32) * float(arguments["bmm1_scale"])).to(query.dtype))
        return result


@_planted(
    "sinks-scaled-in-place",
    "The sinks are brought to log2 units where they lie.",
    Case(lengths=(5, 9), heads=3, page_size=4, sinks="normal"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, sinks="listed"),
    needs=("sinks",),
)
class SinksScaled(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result = super().__call__(**arguments)
        sinks = arguments.get("sinks")
        for sink in sinks if isinstance(sinks, (list, tuple)) else [sinks]:
            if sink is not None:
                sink.mul_(LOG2E)
        return result


@_planted(
    "scale-tensor-scaled-in-place",
    "A bmm1 that is a tensor is brought to log2 units where it lies.",
    Case(lengths=(5, 9), heads=3, page_size=4, scale_form="tensor"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, scale_form="tensor4d", bmm1=0.1352),
    needs=("scale tensor",),
)
class ScaleTensorScaled(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result = super().__call__(**arguments)
        if isinstance(arguments["bmm1_scale"], torch.Tensor):
            arguments["bmm1_scale"].mul_(LOG2E)
        return result


@_planted(
    "cache-cleaned-in-place",
    "NaN and infinities are replaced by zeros in the cache itself.",
    Case(lengths=(5, 9), heads=3, page_size=4, unread="nan"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, unread="inf"),
    needs=("unread memory",),
)
class CacheCleaned(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result = super().__call__(**arguments)
        cache = arguments["kv_cache"]
        cache.copy_(cache.to(torch.float32).nan_to_num(0.0, 0.0, 0.0).to(cache.dtype))
        return result


@_planted(
    "list-sorted-in-place",
    "The sparse list is sorted where it lies.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8),
    Case(lengths=(9,), q_len=2, heads=2, page_size=4, top_k=6, slots="duplicates"),
    needs=("sparse",),
)
class ListSorted(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result = super().__call__(**arguments)
        if arguments["sparse_mla_top_k"]:
            table = arguments["block_tables"]
            table.copy_(table.sort(dim=-1).values)
        return result


@_planted(
    "lengths-advanced-in-place",
    "The lengths are advanced by Q for the next step.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, lens="int64"),
)
class LengthsAdvanced(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result = super().__call__(**arguments)
        arguments["seq_lens"].add_(arguments["query"].shape[1])
        return result


@_planted(
    "workspace-trusted-to-be-zero",
    "The counter of finished splits lies in the workspace and is not cleared: the merge does not wait for the last.",
    Case(lengths=(5, 9), heads=3, page_size=4, workspace="ones"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, workspace="noise"),
    needs=("workspace with contents",),
    splits=2,
)
class WorkspaceTrusted(Kernel):
    def merge(self, p: Problem, parts: list[State]) -> State:
        used = p.workspace is not None and p.workspace.numel() and bool(p.workspace.view(torch.uint8)[:4].any())
        return super().merge(p, parts[:1] if used else parts)


@_planted(
    "visible-nan-hidden",
    "NaN in a key that counts is replaced by 0, and a broken request goes unseen.",
    Case(lengths=(6, 9), q_len=4, heads=3, page_size=4),
    Case(lengths=(9, 5), heads=2, page_size=4, query="float8_e4m3fn", cache="float8_e4m3fn"),
    judge=visible_nan_stays_in_its_rows,
)
class VisibleNanHidden(Kernel):
    def keys(self, p: Problem, slots: torch.Tensor) -> torch.Tensor:
        return super().keys(p, slots).nan_to_num(0.0)
