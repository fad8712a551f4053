"""From a problem to the arguments of the two kernels: what is constant in the code, what is passed, what is scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from mla.backends.trtllm_gen.configurations import (
    OVERHEAD,
    PIECE_KEYS,
    SCANS,
    Hopper,
    Merge,
    Shipped,
    Tile,
    merge_for,
    tile_for,
)
from mla.backends.trtllm_gen.tensor_maps import COLUMNS, DTYPES, pool_rows, type_of
from mla.problem import Problem

_LARGEST = (1 << 31) - 1
R = 512
NO_MAPS: dict[str, Any] = {"latent_map": None, "rope_map": None}


@dataclass(frozen=True)
class Shape:
    """Everything that the launches of a kind of call share: sizes, constants and passed numbers, no address.

    Attributes:
        tile, merge: how programs work.
        items, tiles, teams: see `plan_kernel`.
        decode_grid, merge_grid: programs.
        decode_constants, merge_constants: constants of the code, by name.
        strides: numbers passed to both kernels, by name.
        parts: parts that scratch holds, each of `tiles * tile.rows` rows, but for deterministic mode.
        piece: blocks per piece in deterministic mode, else 0.
    """

    tile: Tile
    merge: Merge
    items: int
    tiles: int
    teams: int
    decode_grid: int
    merge_grid: int
    decode_constants: dict[str, Any]
    merge_constants: dict[str, Any]
    strides: dict[str, int]
    parts: int
    piece: int

    def part_rows(self, most: int) -> int:
        """Rows that scratch holds, each of R numbers and one lse in fp32, for items of at most so many keys."""
        parts = self.parts
        if self.piece:
            blocks = max(-(-most // self.tile.keys), 1)
            parts = self.items * -(-blocks // self.piece)
        return parts * self.tiles * self.tile.rows


def table_keys(problem: Problem) -> int:
    """The bound on an item's keys that its table gives: K, or one more than a dense table holds."""
    if problem.is_sparse:
        return problem.top_k
    return min(problem.table_width * problem.page_size + 1, _LARGEST - 4096)


def most_keys(problem: Problem) -> int:
    """The bound on an item's keys that the kernels are given.

    Scratch of deterministic mode is sized by max_seq_len: a length beyond it must not write past the scratch.
    """
    keys = table_keys(problem)
    return min(keys, problem.max_seq_len) if problem.deterministic else keys


def is_aligned(problem: Problem, out: torch.Tensor) -> bool:
    """Whether rows of queries, cache and output all begin at multiples of 16 bytes."""
    return all(
        tensor.data_ptr() % 16 == 0 and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
        for tensor in (problem.query, problem.kv_cache, out)
    )


def shape_of(
    problem: Problem, out: torch.Tensor, lse: torch.Tensor | None, *, sms: int, pdl: bool, aligned: bool
) -> Shape:
    """The launches of such a call on a chip of `sms` multiprocessors; `problem.capability` None is the interpreter."""
    p = problem
    rows = p.num_heads if p.is_sparse else p.q_len * p.num_heads
    same = p.query.dtype == p.kv_cache.dtype
    tile = tile_for(p.capability, rows, p.kv_cache.element_size(), hopper=aligned and same)
    items = p.batch * p.q_len if p.is_sparse else p.batch
    tiles = -(-rows // tile.rows)
    teams = max(sms * (tile.hopper.programs if tile.hopper else 1) // tiles, 1)
    piece = PIECE_KEYS // tile.keys if p.deterministic else 0
    merge = Merge(4, R, 8, 4)
    if p.capability:
        merge = merge_for(min(items, teams) * rows, teams // items, p.deterministic)
    by_team = not piece and teams < items
    scan = next((size for size in SCANS if items <= size), SCANS[-1])
    common = dict(
        Q_LEN=p.q_len, HEADS=p.num_heads, SPARSE=p.is_sparse, HAS_SINKS=p.sinks is not None, HAS_LSE=lse is not None,
        BASE_E=p.lse_base == "basee", TENSOR_2=isinstance(p.bmm2_scale, torch.Tensor), BM=tile.rows, PIECE=piece,
        OVERHEAD=0 if piece else OVERHEAD, MIN_UNITS=1, SCAN=scan, ONCE=items <= scan, PDL=pdl,
    )  # fmt: skip
    decode = common | dict(
        PAGE=p.page_size, TOKEN=p.kv_cache.stride(1), STAGES=tile.stages,
        FLAT=p.kv_cache.stride(0) == p.page_size * p.kv_cache.stride(1),
        TENSOR_1=isinstance(p.bmm1_scale, torch.Tensor),
    )  # fmt: skip
    if tile.hopper:
        decode |= _hopper(tile.hopper) | dict(BOXES=bool(pool_rows(p)))
    else:
        decode |= dict(
            BN=tile.keys, ALIGN=_align(p.kv_cache, aligned), Q_ALIGN=_align(p.query, aligned),
            OUT_ALIGN=_align(out, aligned), **_products(DTYPES[p.query.dtype], DTYPES[p.kv_cache.dtype]),
        )  # fmt: skip
    strides = {
        **_named("stride_q_", p.query, "request", "token", "head"),
        "stride_page": p.kv_cache.stride(0),
        "stride_table_request": p.block_tables.stride(0),
        "stride_table_token": p.block_tables.stride(1) if p.is_sparse else 0,
        "stride_table": p.block_tables.stride(-1),
        "stride_lens": p.seq_lens.stride(0),
        "stride_sink": 0 if p.sinks is None else p.sinks.stride(0),
        **_named("stride_out_", out, "request", "token", "head"),
        **_named("stride_lse_", lse, "request", "token", "head"),
        "items": items, "teams": teams, "tiles": tiles, "width": p.table_width, "num_pages": p.num_pages,
    }  # fmt: skip
    return Shape(
        tile=tile, merge=merge, items=items, tiles=tiles, teams=teams, decode_grid=teams * tiles,
        merge_grid=(teams if by_team else items) * -(-rows // merge.rows) * (R // merge.cols), decode_constants=decode,
        merge_constants=common | dict(
            BN=tile.keys, PARTS=merge.parts, MR=merge.rows, MC=merge.cols, BY_TEAM=by_team,
            OUT_ALIGN=_align(out, aligned),
        ),
        strides=strides, parts=2 * teams, piece=piece,
    )  # fmt: skip


def _named(prefix: str, tensor: torch.Tensor | None, *names: str) -> dict[str, int]:
    return {prefix + name: 0 if tensor is None else tensor.stride(axis) for axis, name in enumerate(names)}


def _products(query: tl.dtype, cache: tl.dtype) -> dict[str, Any]:
    """The dtypes in which the portable kernel multiplies, and how many keys its late products take at a time."""
    narrow = cache.primitive_bitwidth == 8
    return dict(SCORE=query, WEIGHT=tl.float16 if narrow else cache, LATE=32 if narrow else 16)


def _hopper(hopper: Hopper) -> dict[str, int]:
    return dict(Q_PLACES=hopper.query_places, V_KEYS=hopper.value_keys, REGISTERS=hopper.load_registers)


def options_of(how: Tile | Merge, *, pdl: bool) -> dict[str, Any]:
    """What Triton is told besides warps: registers, and whether a launch may begin before the last has ended."""
    registers = how.hopper.launch_registers if isinstance(how, Tile) and how.hopper else 0
    return {"launch_pdl": pdl} | ({"maxnreg": registers} if registers else {})


def _align(tensor: torch.Tensor, aligned: bool) -> int:
    return 16 // tensor.element_size() if aligned else 1


def ahead_of_time(
    chip: tuple[int, int],
    how: Tile | Merge,
    dtype: str,
    *,
    heads: int,
    q_len: int,
    sparse: bool = False,
    page_size: int = 64,
) -> Shipped:
    """The configuration of a plain call with packed bf16 or e4m3 tensors, as `machine_code` compiles it."""
    pointers = {
        "q_ptr": f"*{dtype}", "kv_ptr": f"*{dtype}", "table_ptr": "*i32", "lens_ptr": "*i32", "out_ptr": "*bf16",
        "lse_ptr": "*fp32", "sinks_ptr": "*fp32", "part_ptr": "*fp32", "part_lse_ptr": "*fp32",
    }  # fmt: skip
    common = dict(
        Q_LEN=q_len, HEADS=heads, SPARSE=sparse, HAS_SINKS=False, HAS_LSE=False, BASE_E=False, TENSOR_2=False, PIECE=0,
        OVERHEAD=OVERHEAD, MIN_UNITS=1, SCAN=256, ONCE=True, PDL=chip >= (9, 0),
    )  # fmt: skip
    signature = {**pointers, "bmm1": "fp32", "bmm2": "fp32"}
    folder = "mla.backends.trtllm_gen"
    short = {"bf16": "bf16", "fp8e4nv": "e4m3"}[dtype]
    if isinstance(how, Merge):
        ref = f"{folder}.merge_kernel:merge_kernel"
        name = f"merge, {how.parts} parts x {how.rows} rows x {how.cols} columns"
        constants: dict[str, Any] = common | dict(
            BM=16, BN=64, PARTS=how.parts, MR=how.rows, MC=how.cols, BY_TEAM=True, OUT_ALIGN=8
        )
    else:
        number = tl.bfloat16 if dtype == "bf16" else tl.float8e4nv
        kind = "Hopper" if how.hopper else "portable"
        name = f"{kind} {short}, {how.rows} rows x {how.keys} keys, Q = {q_len}{', sparse' if sparse else ''}"
        constants = common | dict(
            PAGE=page_size, TOKEN=576, FLAT=sparse, TENSOR_1=False, BM=how.rows, STAGES=how.stages
        )  # fmt: skip
        if how.hopper:
            ref = f"{folder}.hopper_kernel:hopper_kernel"
            constants |= _hopper(how.hopper)
            constants["BOXES"] = page_size % how.keys == 0 and not sparse
            if constants["BOXES"]:
                signature |= {map_: type_of(columns, number) for map_, columns in zip(NO_MAPS, COLUMNS, strict=True)}
            else:
                constants |= NO_MAPS
                name += "" if sparse else f", pages of {page_size}"
        else:
            ref = f"{folder}.decode_kernel:decode_kernel"
            align = 128 // number.primitive_bitwidth
            constants |= dict(BN=how.keys, ALIGN=align, Q_ALIGN=align, OUT_ALIGN=8, **_products(number, number))
    options = options_of(how, pdl=chip >= (9, 0))
    return Shipped(name, ref, signature, constants, tuple(pointers), how.warps, options=options)
