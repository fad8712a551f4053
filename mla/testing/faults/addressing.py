"""From a position to memory: the block table, pages, and the strides of cache and tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from mla.problem import Problem
from mla.testing.case import Case
from mla.testing.faults.fault import planted
from mla.testing.faults.raw import Careless, load, load_as_int32

_planted = partial(planted, "addressing")


@_planted(
    "table-row-per-token",
    "The block table is read with the row of the query token, b * Q + t, and not that of the request.",
    Case(lengths=(5, 9), q_len=2, heads=3, page_size=4),
    Case(lengths=(6, 11, 3), q_len=3, heads=3, page_size=4, values="request", scores="equal"),
    needs=("dense", "several tokens"),
)
class TableRowPerToken(Careless):
    def page(self, p: Problem, b: int, t: int, column: torch.Tensor) -> torch.Tensor:
        row = b * p.q_len + t
        offsets = row * p.block_tables.stride(0) + column * p.block_tables.stride(1)
        return load(p.block_tables, offsets).to(torch.int64)


@_planted(
    "table-of-the-first-request",
    "Every request reads the first row of the block table, so only the first is right.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(3, 4, 2), heads=3, page_size=4, values="request", scores="equal"),
    needs=("dense", "several requests"),
)
class TableOfTheFirst(Careless):
    def page(self, p: Problem, b: int, t: int, column: torch.Tensor) -> torch.Tensor:
        return super().page(p, 0, t, column)


@_planted(
    "table-column-off-by-one",
    "The pages are taken from the next column.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(20,), heads=3, page_size=4, table_slack=0),
    needs=("dense",),
)
class NextColumn(Careless):
    def page(self, p: Problem, b: int, t: int, column: torch.Tensor) -> torch.Tensor:
        return super().page(p, b, t, column + 1)


@_planted(
    "table-row-stride-taken-for-its-width",
    "The rows of the block table are taken to be W apart.",
    Case(lengths=(5, 9), heads=3, page_size=4, table_layout="sliced"),
    Case(lengths=(9, 3, 7), q_len=2, heads=3, page_size=4, table_layout="sliced"),
    needs=("dense", "strided table"),
)
class PackedTableRows(Careless):
    def page(self, p: Problem, b: int, t: int, column: torch.Tensor) -> torch.Tensor:
        return load(p.block_tables, b * p.table_width + column * p.block_tables.stride(1)).to(torch.int64)


@_planted(
    "table-column-stride-ignored",
    "The columns of the block table are taken to lie side by side.",
    Case(lengths=(5, 9), heads=3, page_size=4, table_layout="spread"),
    Case(lengths=(20,), q_len=2, heads=3, page_size=4, table_layout="spread"),
    needs=("dense", "spread table", "several pages"),
)
class PackedTableColumns(Careless):
    def page(self, p: Problem, b: int, t: int, column: torch.Tensor) -> torch.Tensor:
        return load(p.block_tables, b * p.block_tables.stride(0) + column).to(torch.int64)


@_planted(
    "int64-table-read-as-int32",
    "A block table of int64 is read as int32: every second column is the upper half of its neighbour.",
    Case(lengths=(5, 9), heads=3, page_size=4, tables="int64"),
    Case(lengths=(20,), q_len=2, heads=3, page_size=4, tables="int64"),
    needs=("dense", "int64 tables"),
)
class TableAsInt32(Careless):
    def page(self, p: Problem, b: int, t: int, column: torch.Tensor) -> torch.Tensor:
        if p.block_tables.dtype is torch.int32:
            return super().page(p, b, t, column)
        offsets = b * p.block_tables.stride(0) + column * p.block_tables.stride(1)
        return load_as_int32(p.block_tables, offsets).to(torch.int64)


@_planted(
    "first-page-alone-looked-up",
    "Only the first page is looked up; the others are taken to follow it in memory.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(20,), heads=3, page_size=4, seed=1),
    needs=("dense", "several pages"),
)
class PagesInARow(Careless):
    def page(self, p: Problem, b: int, t: int, column: torch.Tensor) -> torch.Tensor:
        return super().page(p, b, t, torch.zeros_like(column)) + column


@_planted(
    "first-page-for-all",
    "Every page of a request is its first.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(20,), heads=3, page_size=16),
    needs=("dense", "several pages"),
)
class FirstPageForAll(Careless):
    def page(self, p: Problem, b: int, t: int, column: torch.Tensor) -> torch.Tensor:
        return super().page(p, b, t, torch.zeros_like(column))


@_planted(
    "page-size-taken-for-64",
    "The column and the place in the page are computed with a page size of 64.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(70,), heads=2, page_size=32),
    needs=("dense", "pages not of 64"),
)
class PagesOf64(Careless):
    def slots(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        if p.is_sparse or not p.table_width:
            return super().slots(p, b, t, n)
        position = torch.arange(n, device=p.device)
        return self.page(p, b, t, position // 64) * 64 + position % 64


@_planted(
    "page-stride-taken-for-packed",
    "Pages are taken to be P * D apart, whatever the cache's stride.",
    Case(lengths=(5, 9), heads=3, page_size=4, cache_layout="layers"),
    Case(lengths=(5, 9), q_len=2, heads=3, page_size=4, cache_layout="every_second", cache_rank=4),
    needs=("strided cache",),
)
class PackedPages(Careless):
    def address(self, p: Problem, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return page * (p.page_size * p.head_dim) + offset * p.kv_cache.stride(1)


@_planted(
    "page-stride-from-the-token-stride",
    "Pages are taken to be P tokens apart.",
    Case(lengths=(5, 9), heads=3, page_size=4, cache_layout="layers"),
    Case(lengths=(40, 7), heads=3, page_size=4, cache_layout="every_second", top_k=8),
    needs=("pages apart",),
)
class PagesOfTokens(Careless):
    def address(self, p: Problem, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return (page * p.page_size + offset) * p.kv_cache.stride(1)


@_planted(
    "token-stride-taken-for-D",
    "Tokens are taken to be D apart, whatever the cache's stride.",
    Case(lengths=(5, 9), heads=3, page_size=4, cache_layout="wider"),
    Case(lengths=(5, 9), q_len=2, heads=3, page_size=16, cache_layout="wider", cache_rank=4),
    needs=("wide cache rows",),
)
class PackedTokens(Careless):
    def address(self, p: Problem, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return page * p.kv_cache.stride(0) + offset * p.head_dim


@_planted(
    "cache-start-rounded-down-to-16-bytes",
    "The start of the cache is rounded down to a multiple of 16 bytes, as vector loads need it.",
    Case(lengths=(5, 9), heads=3, page_size=4, cache_layout="offset"),
    Case(lengths=(9,), q_len=2, heads=3, page_size=4, cache_layout="offset", query="float16", cache="float16"),
    needs=("unaligned cache",),
)
class StartRoundedDown(Careless):
    def address(self, p: Problem, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        size = p.kv_cache.element_size()
        return super().address(p, page, offset) - p.kv_cache.storage_offset() * size % 16 // size


@dataclass
class Wrapping(Careless):
    """Addresses in too few bits: from `wrap` elements on they are wrong.

    A real kernel wraps at 2^31 elements, and few tests can afford such a pool. The mistake is the same wherever the
    edge lies, so the faults below move it to where a pool of a few hundred tokens shows it.
    """

    wrap: int = 2**31

    def address(self, p: Problem, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return self.wrapped(super().address(p, page, offset))

    def wrapped(self, address: torch.Tensor) -> torch.Tensor:
        """What a signed integer makes of it: from `wrap` on, addresses are negative."""
        return (address + self.wrap) % (2 * self.wrap) - self.wrap


@_planted(
    "signed-addresses-wrap",
    "Page times stride is computed in signed 32 bits (here: with the edge moved from 2^31 to 2^17 elements).",
    Case(lengths=(150, 90), heads=2, page_size=16),
    Case(lengths=(60, 40), heads=2, page_size=16, cache_layout="layers", seed=1),
    wrap=2**17,
)
class SignedWrap(Wrapping):
    pass


@_planted(
    "unsigned-addresses-wrap",
    "Page times stride is computed in unsigned 32 bits (here: with the edge moved from 2^32 to 2^17 elements).",
    Case(lengths=(150, 90), heads=2, page_size=16),
    Case(lengths=(60, 40), heads=2, page_size=16, cache_layout="layers", seed=1),
    wrap=2**17,
)
class UnsignedWrap(Wrapping):
    def wrapped(self, address: torch.Tensor) -> torch.Tensor:
        return address % self.wrap
