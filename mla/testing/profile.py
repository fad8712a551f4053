"""What a kernel claims, in the words of cases. What it does not claim is not judged; what it claims is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mla.capabilities import Capabilities
from mla.checks import short
from mla.testing.case import Case

PUBLIC_PAIRS = (
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e4m3fn"),
)
"""The (query, cache) dtypes of the contract; float32 and float64 are the reference's alone."""


@dataclass(frozen=True)
class Profile:
    """The claims of one kernel; the defaults claim the whole contract.

    Attributes:
        pairs: (query, cache) dtype names.
        out_dtypes: dtype names of given outputs; a kernel that cannot fill a given one claims none: ().
        dense: dense calls.
        sparse: sparse calls.
        sinks: sinks.
        lse: the log-sum-exp.
        lse_bases: "base2", "basee", or both.
        max_q_len: the largest Q, or None.
        heads: the head counts, or None for any.
        page_sizes: the page sizes, or None for any.
        strides: strided queries, pools, tables and outputs are honoured.
        scale_tensors: bmm1_scale and bmm2_scale may be device tensors.
        index_dtypes: of tables and lengths.
        any_scale: bmm1_scale may be zero or negative.
        empty_rows: requests of length 0, and lists of holes alone, give the identity.
        short_rows: lengths below Q are legal, and query tokens that see no key give the identity.
        empty_pools: a cache of no pages at all is legal (every request is empty then).
        unaligned: queries, pools and outputs may begin anywhere, not only at multiples of 16 bytes.
        any_table: table columns past a length may hold anything, and the table any width.
        far_pages: pools beyond 2^31 elements.
        devices: device types it runs on.
    """

    pairs: tuple[tuple[str, str], ...] = PUBLIC_PAIRS
    out_dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    dense: bool = True
    sparse: bool = True
    sinks: bool = True
    lse: bool = True
    lse_bases: tuple[str, ...] = ("base2", "basee")
    max_q_len: int | None = None
    heads: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    strides: bool = True
    scale_tensors: bool = True
    index_dtypes: tuple[str, ...] = ("int32", "int64")
    any_scale: bool = True
    empty_rows: bool = True
    short_rows: bool = True
    empty_pools: bool = True
    unaligned: bool = True
    any_table: bool = True
    far_pages: bool = True
    devices: tuple[str, ...] = ("cpu", "cuda")

    def why_not(self, case: Case) -> list[str]:
        """What the case needs and the kernel does not claim; empty when the case may be judged."""
        layouts = {case.query_layout, case.cache_layout, case.table_layout, case.out_layout}
        empty = 0 in case.lengths or not case.lengths or case.slots == "all_holes"
        lacks = {
            f"{case.query} query with {case.cache} cache": (case.query, case.cache) not in self.pairs,
            f"{case.out} out": case.out is not None and case.out not in self.out_dtypes,
            "dense": not case.top_k and not self.dense,
            "sparse": case.top_k > 0 and not self.sparse,
            "sinks": case.sinks != "none" and not self.sinks,
            "lse": case.lse != "none" and not self.lse,
            f"lse in {case.lse_base}": case.lse != "none" and case.lse_base not in self.lse_bases,
            f"Q = {case.q_len}": self.max_q_len is not None and case.q_len > self.max_q_len,
            f"H = {case.heads}": self.heads is not None and case.heads not in self.heads,
            f"page size {case.page_size}": self.page_sizes is not None and case.page_size not in self.page_sizes,
            "strides": layouts != {"packed"} and not self.strides,
            "scale tensors": case.scale_form != "float" and not self.scale_tensors,
            f"{case.tables} tables": case.tables not in self.index_dtypes,
            f"{case.lens} lengths": case.lens not in self.index_dtypes,
            "a scale of zero or less": case.bmm1 <= 0 and not self.any_scale,
            "empty rows": empty and not self.empty_rows,
            "a pool of no pages": not any(case.lengths) and not case.spare_pages and not self.empty_pools,
            "lengths below Q": any(0 < n < case.q_len for n in case.lengths) and not self.short_rows,
            "unaligned tensors": "offset" in layouts and not self.unaligned,
            "any table": (case.tail != "zero" or case.table_slack != 0) and not self.any_table,
            "far pages": case.far_pages > 0 and not self.far_pages,
        }
        return [what for what, lacking in lacks.items() if lacking]

    @classmethod
    def of(cls, capabilities: Capabilities) -> Profile:
        """The profile of a registered backend, from what it claims as data."""
        c = capabilities
        heads = None if c.max_heads is None else tuple(range(1, c.max_heads + 1))
        return cls(
            pairs=tuple((short(q), short(kv)) for q, kv in sorted(c.dtype_pairs, key=str)),
            out_dtypes=tuple(short(dtype) for dtype in c.out_dtypes),
            dense=c.dense,
            sparse=c.sparse,
            sinks=c.sinks,
            lse=c.lse,
            max_q_len=c.max_q_len,
            heads=heads,
            page_sizes=c.page_sizes,
            devices=("cpu", "cuda") if c.device_types is None else c.device_types,
        )

    def adapt(self, case: Case, *, keep_sizes: bool = False) -> Case | None:
        """The case itself if it is claimed, or the nearest claimed one that asks the same question, or None.

        Only what a property does not ask about is changed: dtype pair, head count and page size (unless `keep_sizes`),
        extra table columns, an lse that is not claimed. None when the case needs something that is not claimed.
        """
        changes: dict[str, object] = {}
        if (case.query, case.cache) not in self.pairs and (case.query, case.cache) == ("bfloat16", "bfloat16"):
            changes |= {"query": self.pairs[0][0], "cache": self.pairs[0][1]}
        if not keep_sizes and self.heads is not None and case.heads not in self.heads:
            changes["heads"] = min(self.heads, key=lambda heads: (abs(heads - case.heads), heads))
        if not keep_sizes and self.page_sizes is not None and case.page_size not in self.page_sizes:
            changes["page_size"] = min(self.page_sizes, key=lambda size: (abs(size - case.page_size), size))
        if not self.any_table:
            changes |= {"tail": "zero", "table_slack": 0}
        if case.lse == "returned" and not self.lse:
            changes["lse"] = "none"
        elif self.lse and case.lse_base not in self.lse_bases:
            changes["lse_base"] = self.lse_bases[0]
        adapted = replace(case, **changes)  # type: ignore[arg-type]
        return None if self.why_not(adapted) else adapted
