"""From a case to a call: the tensors, with poison in everything that must not be read, and a watch over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mla.problem import Problem
from mla.testing import layouts
from mla.testing.case import Case

D, R = 576, 512
TAILS = {"zero": 0, "minus_one": -1, "int_max": 2**31 - 1, "int_min": -(2**31)}


@dataclass
class Call:
    """The arguments of one call, ready to be passed, and what must not change.

    Attributes:
        case: where it came from.
        arguments: parameter name -> value, for `function(**arguments)`; without `backend`.
        problem: the same, checked.
    """

    case: Case
    arguments: dict[str, Any]
    problem: Problem
    watched: list[layouts.Watch] = field(repr=False)

    def run(self, function: Callable[..., Any], **extra: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse or None) of `function(**arguments, **extra)`, given buffers included."""
        result = function(**self.arguments, **extra)
        if self.case.lse == "none":
            return result, None
        out, lse = result
        return out, lse

    def disturbed(self) -> list[str]:
        """Names of buffers of which a byte changed that must not: inputs, and what lies around outputs."""
        return [watch.name for watch in self.watched if watch.changed()]


def build(case: Case, device: torch.device | str = "cpu") -> Call:
    """The call that `case` describes. The same bits on every machine and device.

    Args:
        case: what to build.
        device: where its tensors go.

    Returns:
        The call, with poison in everything that must not be read.

    Raises:
        ValueError: the case is no legal problem.
        TypeError: its dtypes do not go together.

    Example:
        >>> import mla
        >>> from mla.testing import Case, assert_close
        >>> call = build(Case(lengths=(5, 130), heads=2))
        >>> assert_close(call.run(mla.trtllm_batch_decode_with_kv_cache_mla), call.problem)
        >>> call.disturbed()
        []
    """
    make = _Maker(case, torch.device(device))
    arguments: dict[str, Any] = {
        "query": make.query(),
        "kv_cache": make.cache(),
        "workspace_buffer": make.workspace(),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": R,
        "qk_rope_head_dim": D - R,
        "block_tables": make.tables(),
        "seq_lens": make.seq_lens(),
        "max_seq_len": max([0, *case.lengths]) + case.max_slack,
        "sparse_mla_top_k": case.top_k,
        "bmm1_scale": make.scale("bmm1_scale", case.bmm1),
        "bmm2_scale": make.scale("bmm2_scale", case.bmm2),
        "sinks": make.sinks(),
        "out": make.out(),
        "return_lse": case.lse != "none",
        "lse": make.lse(),
        "return_lse_base": case.lse_base,
    }
    return Call(case, arguments, Problem.from_call(**arguments), make.watched)


class _Maker:
    """Draws everything from the case's seed, in a fixed order."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.random = torch.Generator().manual_seed(case.seed)
        self.watched: list[layouts.Watch] = []
        pages = [math.ceil(length / case.page_size) for length in case.lengths]
        self.num_pages = sum(pages) + case.spare_pages
        shuffled = torch.randperm(self.num_pages, generator=self.random).tolist()
        starts = [sum(pages[:b]) for b in range(case.batch)]
        self.pages: list[list[int]] = [shuffled[start : start + n] for start, n in zip(starts, pages, strict=True)]
        self.lists = self._draw_lists() if case.top_k else []

    def slot(self, request: int, position: int) -> int:
        """Where a token lies in the pages that are in use; `far` more in the whole pool."""
        return (
            self.pages[request][position // self.case.page_size] * self.case.page_size + position % self.case.page_size
        )

    def _integers(self, count: int, below: int) -> list[int]:
        drawn: list[int] = torch.randint(max(below, 1), (count,), generator=self.random).tolist()
        return drawn

    def _draw_lists(self) -> list[list[list[int]]]:
        """[B][Q] the top-k list of each query token: min(n, K) entries that count, and a tail that does not."""
        case, lists = self.case, []
        far = case.far_pages * case.page_size
        for b in range(case.batch):
            rows = []
            for t in range(case.q_len):
                n = case.visible(b, t)
                counted = min(n, case.top_k)
                order = torch.randperm(n, generator=self.random)[:counted].tolist()
                if case.slots == "duplicates" and counted:
                    order = [order[i] for i in self._integers(counted, max(counted // 2, 1))]
                entries = [far + self.slot(b, j) for j in order]
                rows.append(self._dig_holes(entries) + [TAILS[case.tail]] * (case.top_k - counted))
            lists.append(rows)
        return lists

    def _dig_holes(self, entries: list[int]) -> list[int]:
        kind, pool = self.case.slots, (self.case.far_pages + self.num_pages) * self.case.page_size
        dice = self._integers(len(entries), 3)
        if kind == "holes":
            return [
                (-1, -5, -(2**31))[i % 3] if die == 0 else slot
                for i, (slot, die) in enumerate(zip(entries, dice, strict=True))
            ]
        if kind == "past":
            return [
                (pool, pool + 7, 2**31 - 1)[i % 3] if die == 0 else slot
                for i, (slot, die) in enumerate(zip(entries, dice, strict=True))
            ]
        if kind == "front":
            return [-1 if i < (len(entries) + 1) // 2 else slot for i, slot in enumerate(entries)]
        return [-1] * len(entries) if kind == "all_holes" else entries

    def _place(self, name: str, value: torch.Tensor, layout: str, fill: str | None = None) -> torch.Tensor:
        placed, watch = layouts.place(name, value.to(self.device), layout, fill or self.case.unread, written=False)
        self.watched.append(watch)
        return placed

    def query(self) -> torch.Tensor:
        case = self.case
        shape = (case.batch, case.q_len, case.heads, D)
        if case.scores == "equal":
            q = torch.zeros(shape)
        elif case.scores == "one_hot":
            q = torch.zeros(shape)
            q[..., 0] = 1.0
        else:
            size = {"normal": 1.0, "peaked": 6.0, "flat": 0.05}[case.scores]
            q = size * torch.randn(shape, generator=self.random)
        return self._place("query", q.to(getattr(torch, case.query)), case.query_layout)

    def _latents(self, request: int, length: int) -> torch.Tensor:
        """[length, D] what the request's tokens store."""
        case = self.case
        if case.scores == "one_hot":
            latents = torch.zeros(length, D)
            latents[:, 0] = torch.arange(length) % 64
            return latents
        position = torch.arange(length)[:, None].expand(length, D)
        drawn = torch.randn(length, D, generator=self.random)
        if case.values == "ones":
            return torch.ones(length, D)
        if case.values == "position":
            return (position % 64).float()
        if case.values == "request":
            return torch.full((length, D), float(request + 1))
        return (1 - 2 * (position % 2)).float() if case.values == "alternating" else drawn

    def cache(self) -> torch.Tensor:
        case = self.case
        pool = torch.empty(self.num_pages * case.page_size, D, dtype=getattr(torch, case.cache))
        layouts.poison(pool, case.unread)
        far = case.far_pages * case.page_size
        listed = {slot - far for rows in self.lists for row in rows for slot in row}
        for b, length in enumerate(case.lengths):
            latents = self._latents(b, length).to(pool.dtype)
            slots = [self.slot(b, j) for j in range(length)]
            kept = [j for j, slot in enumerate(slots) if not case.top_k or slot in listed]
            pool[[slots[j] for j in kept]] = latents[kept]
        used = pool.view(self.num_pages, case.page_size, D)
        if case.far_pages:
            cache = _untouched((case.far_pages + self.num_pages, case.page_size, D), pool.dtype, self.device)
            cache[case.far_pages :] = used.to(self.device)
        else:
            cache = self._place("kv_cache", used, case.cache_layout)
        return cache.unsqueeze(1) if case.cache_rank == 4 else cache

    def tables(self) -> torch.Tensor:
        case, dtype = self.case, getattr(torch, self.case.tables)
        if case.top_k:
            lists = torch.tensor(self.lists, dtype=dtype).reshape(case.batch, case.q_len, case.top_k)
            return self._place("block_tables", lists, case.table_layout, "max")
        width = max([len(pages) for pages in self.pages], default=0) + case.table_slack
        far = [[case.far_pages + page for page in pages] for pages in self.pages]
        rows = [pages + [TAILS[case.tail]] * (width - len(pages)) for pages in far]
        table = torch.tensor(rows, dtype=dtype).reshape(case.batch, width)
        return self._place("block_tables", table, case.table_layout, "max")

    def seq_lens(self) -> torch.Tensor:
        lengths = torch.tensor(self.case.lengths, dtype=getattr(torch, self.case.lens))
        return self._place("seq_lens", lengths, "spread" if self.case.table_layout == "spread" else "packed", "max")

    def scale(self, name: str, value: float) -> float | torch.Tensor:
        if self.case.scale_form == "float":
            return value
        shape = () if self.case.scale_form == "tensor" else (1, 1, 1, 1)
        return self._place(name, torch.full(shape, value, dtype=torch.float32), "packed")

    def sinks(self) -> torch.Tensor | list[torch.Tensor] | None:
        case = self.case
        drawn = torch.randn(case.heads, generator=self.random)
        if case.sinks == "none":
            return None
        if case.sinks == "large":
            drawn = torch.where(drawn > 0, 30.0, -30.0)
        if case.sinks == "off":
            drawn = torch.full_like(drawn, -math.inf)
        sink = self._place("sinks", drawn, "packed")
        return [sink] if case.sinks == "listed" else sink

    def workspace(self) -> torch.Tensor | None:
        kind = self.case.workspace
        if kind == "none":
            return None
        size = 0 if kind == "empty" else 1 << 16
        content = {
            "empty": torch.zeros(size, dtype=torch.uint8),
            "zeros": torch.zeros(size, dtype=torch.uint8),
            "ones": torch.full((size,), 255, dtype=torch.uint8),
            "noise": torch.randint(256, (size,), generator=self.random, dtype=torch.uint8),
        }[kind]
        return content.to(self.device)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
        stale = torch.full(shape, math.nan, dtype=dtype, device=self.device)
        placed, watch = layouts.place(name, stale, layout, "noise", written=True)
        self.watched.append(watch)
        return placed

    def out(self) -> torch.Tensor | None:
        case = self.case
        if case.out is None:
            return None
        out = self._buffer("out", (case.batch, case.q_len, case.heads, R), getattr(torch, case.out), case.out_layout)
        return out.squeeze(1) if case.out_rank == 3 else out

    def lse(self) -> torch.Tensor | None:
        case = self.case
        rows = (case.batch, case.q_len, case.heads)
        if case.lse == "rows":
            return self._buffer("lse", rows, torch.float32, "offset")
        if case.lse == "flat":
            return self._buffer("lse", (rows[0] * rows[1], rows[2]), torch.float32, "sliced")
        if case.lse == "transposed":
            return self._buffer("lse", (rows[2], rows[0] * rows[1]), torch.float32, "packed").T
        return None


def _untouched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory that stays so even where PyTorch is told to fill it: most of it is never touched."""
    settings: Any = torch.utils.deterministic
    kept = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    finally:
        settings.fill_uninitialized_memory = kept
