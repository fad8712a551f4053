"""A case: a small description from which a whole call is built, the same on every machine and device.

A case holds words and integers only. It prints as the constructor call that rebuilds it, hypothesis can draw and shrink
it, and everything that a kernel must not read is poisoned when it is built.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

SM_SCALE = (128 + 64) ** -0.5  #: 1 / sqrt of the head dimension before absorption

CHOICES: dict[str, tuple[str | None, ...]] = {
    "query": ("bfloat16", "float16", "float8_e4m3fn", "float32", "float64"),
    "cache": ("bfloat16", "float16", "float8_e4m3fn", "float32", "float64"),
    "out": (None, "bfloat16", "float16", "float32"),
    "slots": ("plain", "holes", "front", "past", "duplicates", "all_holes"),
    "sinks": ("none", "normal", "large", "off", "listed"),
    "scores": ("normal", "peaked", "flat", "equal", "one_hot"),
    "values": ("normal", "ones", "position", "request", "alternating"),
    "unread": ("nan", "inf", "max", "zero", "noise"),
    "tail": ("zero", "minus_one", "int_max", "int_min"),
    "scale_form": ("float", "tensor", "tensor4d"),
    "query_layout": ("packed", "wider", "transposed", "offset", "spread"),
    "cache_layout": ("packed", "layers", "every_second", "wider", "offset"),
    "table_layout": ("packed", "sliced", "spread"),
    "out_layout": ("packed", "sliced", "transposed", "offset"),
    "tables": ("int32", "int64"),
    "lens": ("int32", "int64"),
    "lse": ("none", "returned", "flat", "rows", "transposed"),
    "lse_base": ("base2", "basee"),
    "workspace": ("none", "empty", "zeros", "ones", "noise"),
}
"""What each word of a case may be; the first is plain, the last are the nastier ones."""


@dataclass(frozen=True, repr=False)
class Case:
    """One call, described.

    Attributes:
        lengths: KV length of each request; B is their number. May be 0 or less than q_len.
        q_len: Q.
        heads: H.
        page_size: P.
        query: dtype name of the query.
        cache: dtype name of the cache.
        out: dtype name of the given output; None is no buffer given.
        top_k: K, or 0 for dense.
        slots: what the sparse lists hold: "plain" visible slots in random order, "holes" negative ones among them,
            "front" holes first, "past" slots past the pool, "duplicates", "all_holes".
        sinks: "none", "normal", "large" (plus and minus 30), "off" (minus infinity), "listed" (one tensor in a list).
        scores: "normal", "peaked" (one key wins), "flat", "equal" (q = 0: every key weighs the same), "one_hot" (query
            and keys along one axis: the softmax of a ramp).
        values: the latents: "normal", "ones", "position" (token j is j mod 64), "request" (request b is b + 1),
            "alternating" (plus and minus 1).
        bmm1: bmm1_scale.
        bmm2: bmm2_scale.
        scale_form: how they are passed: "float", "tensor" (of no dimension) or "tensor4d".
        unread: what lies in each slot, page and gap that must not be read: "nan", "inf", "max", "zero", "noise".
        tail: ids in the table columns that must not be read.
        spare_pages: pages that belong to nobody.
        table_slack: columns more than needed.
        far_pages: so many pages, never touched, lie before all others: addresses beyond 32 bits without the memory
            traffic (58300 pages of 64 pass 2^31 elements). Only with cache_layout "packed".
        query_layout: how the query lies in a larger buffer: "packed", "wider", "transposed", "offset", "spread".
        cache_layout: the same: "packed", "layers", "every_second", "wider", "offset".
        table_layout: the same: "packed", "sliced", "spread".
        out_layout: the same: "packed", "sliced", "transposed", "offset".
        cache_rank: 3 or 4 dimensions.
        out_rank: 4, or 3 when q_len is 1.
        tables: dtype name of the block table.
        lens: dtype name of the lengths.
        lse: "none", "returned", or a buffer "flat" [B*Q, H], "rows" [B, Q, H], "transposed".
        lse_base: its base, "base2" or "basee".
        max_slack: max_seq_len is the largest length plus this.
        workspace: "none", or its contents.
        seed: everything random comes from it.
    """

    lengths: tuple[int, ...] = (5,)
    q_len: int = 1
    heads: int = 16
    page_size: int = 64
    query: str = "bfloat16"
    cache: str = "bfloat16"
    out: str | None = None
    top_k: int = 0
    slots: str = "plain"
    sinks: str = "none"
    scores: str = "normal"
    values: str = "normal"
    bmm1: float = SM_SCALE
    bmm2: float = 1.0
    scale_form: str = "float"
    unread: str = "nan"
    tail: str = "minus_one"
    spare_pages: int = 1
    table_slack: int = 1
    far_pages: int = 0
    query_layout: str = "packed"
    cache_layout: str = "packed"
    table_layout: str = "packed"
    out_layout: str = "packed"
    cache_rank: int = 3
    out_rank: int = 4
    tables: str = "int32"
    lens: str = "int32"
    lse: str = "returned"
    lse_base: str = "base2"
    max_slack: int = 0
    workspace: str = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}")
        if self.cache_rank not in (3, 4) or self.out_rank not in (3, 4) or (self.out_rank == 3 and self.q_len != 1):
            raise ValueError("expected cache_rank 3 or 4, and out_rank 4, or 3 with q_len 1")
        if self.far_pages and self.cache_layout != "packed":
            raise ValueError(f"far_pages is {self.far_pages} and cache_layout {self.cache_layout!r}; expected 'packed'")

    def __repr__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        words = {name: repr(value) for name, value in changed.items()}
        if len(self.lengths) > 8 and len(set(self.lengths)) == 1:
            words["lengths"] = f"{self.lengths[:1]!r} * {len(self.lengths)}"
        return f"Case({', '.join(f'{name}={word}' for name, word in words.items())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints for a failing case."""
        printer.text(repr(self))

    @property
    def batch(self) -> int:
        """B."""
        return len(self.lengths)

    def visible(self, request: int, token: int) -> int:
        """n, the keys that a query token may see."""
        return max(self.lengths[request] - self.q_len + token + 1, 0)
