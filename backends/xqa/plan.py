"""From a problem to what is launched: configuration, grids, scratch, and every argument of the two kernels.

Everything here comes from shapes, strides, dtypes and the device; nothing is read from it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch

from mla.backends.xqa.config import (
    LONGEST,
    MERGE_THREADS,
    MULTIPLIES_E4M3,
    RANK,
    SHARED_LIMIT,
    SHARED_PER_SM,
    SPILLS_64_ROWS,
    Config,
)
from mla.backends.xqa.kernel.schedule import ALONE
from mla.backends.xqa.specialize import KERNELS
from mla.problem import Problem

OVERHEAD = 2  # what a request costs besides its keys, in tiles
AT_LEAST = 2  # tiles that a team must have before another team joins in
PIECE_KEYS = 2048  # where requests are cut in deterministic mode, whatever else is in the batch
MOST_STAGES = 4
MERGES = ((4, MERGE_THREADS), (1, MERGE_THREADS), (1, RANK // 4))
"""(slices of a row, threads of a block) of the merge kernel: the first whose blocks run all at once, or the last."""
MERGE_THREADS_AT_ONCE = 1024  # of a multiprocessor
LN_2 = 0.6931471805599453
QUERY_WORD = 4  # bytes of a query that are loaded at once

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3", torch.float32: "fp32"}


@dataclass(frozen=True)
class Machine:
    """What of a GPU matters: its compute capability, and how many multiprocessors it has."""

    capability: tuple[int, int]
    multiprocessors: int


@dataclass(frozen=True)
class Plan:
    """What is launched for a problem.

    Attributes:
        config: of both kernels.
        requests: B, or in sparse mode B * Q: what has keys of its own. rows: query vectors that share them.
        tiles: blocks that such a request takes. teams: groups of so many blocks; the decode grid is teams * tiles.
        rows_per_block: of the merge kernel. slices: parts into which it cuts a row. merge_threads,
            merge_blocks: its threads and its grid.
        one_each: teams, if each multiprocessor had one block only. overhead, at_least: see `kernel/schedule.py`.
        piece: tiles of a piece in deterministic mode, or 0. pieces: slots of scratch for each request then.
        part_rows: rows of partial results in scratch.
    """

    config: Config
    requests: int
    rows: int
    tiles: int
    teams: int
    rows_per_block: int
    slices: int
    merge_threads: int
    merge_blocks: int
    piece: int = 0
    pieces: int = 0
    one_each: int = 1 << 20
    overhead: int = OVERHEAD
    at_least: int = AT_LEAST

    @property
    def decode_blocks(self) -> int:
        return self.teams * self.tiles

    @property
    def part_rows(self) -> int:
        slots = self.requests * self.pieces if self.piece else 2 * self.teams
        return slots * self.tiles * self.config.rows

    @property
    def scratch_bytes(self) -> tuple[int, int, int]:
        """Of partial results, of their log-sum-exps, of the requests' first units; each a multiple of 16."""
        sizes = (self.part_rows * RANK * 4, self.part_rows * 4, (self.requests + 1) * 4)
        return tuple(-(-size // 16) * 16 for size in sizes)  # type: ignore[return-value]

    @property
    def merge_shared_bytes(self) -> int:
        return 20 * self.merge_threads + 4 * max(self.teams, self.pieces)


_FLOATS = frozenset({"bmm1", "bmm2", "lse_unit"})
_SMALL = frozenset(
    {"entries", "page_size", "table_wide", "columns", "length_wide", "requests", "q_len", "heads", "teams", "tiles"}
)
_SMALL |= {"overhead", "at_least", "rows_per_block", "slices", "threads", "one_each", "page_factor", "page_shift"}


def argument_names(kernel: str) -> tuple[str, ...]:
    """The parameters of a kernel, in order."""
    kernel_function: Any = KERNELS[kernel]
    return tuple(inspect.signature(kernel_function).parameters)


def argument_type(name: str) -> str:
    """The type of a kernel's parameter, in the words of `isa.py`: I64 for addresses and steps."""
    return "F32" if name in _FLOATS else "I32" if name in _SMALL else "I64"


def kind_of(problem: Problem, capability: tuple[int, int]) -> str:
    """Which of `config.KINDS` a problem is on a chip."""
    query, cache = _SHORT[problem.query.dtype], _SHORT[problem.kv_cache.dtype]
    if query != cache:
        return f"{query}_on_{cache}"
    return kind_on(query, capability)


def kind_on(kind: str, capability: tuple[int, int]) -> str:
    """The kind itself, or where the chip's tensor cores do not multiply e4m3, the one that stands for it."""
    return "e4m3_by_fp16" if kind == "e4m3" and capability not in MULTIPLIES_E4M3 else kind


def _multiples(tensor: torch.Tensor, size: int, axes: range) -> bool:
    """Whether the tensor begins at a multiple of `size` bytes, and so does every step along these axes."""
    element = tensor.element_size()
    steps = all(tensor.stride(axis) * element % size == 0 for axis in axes if tensor.shape[axis] > 1)
    return steps and tensor.data_ptr() % size == 0


def configure(problem: Problem, out: torch.Tensor, machine: Machine) -> Config:
    """The configuration that suits a problem on a machine."""
    p = problem
    rows = p.num_heads if p.is_sparse else p.num_heads * p.q_len
    form = Config(
        kind=kind_of(p, machine.capability),
        row_tiles=1 if rows <= 16 else 2 if rows <= 32 else 4,
        sparse=p.is_sparse,
        aligned=_multiples(p.kv_cache, 16, range(2)) and _multiples(p.query, QUERY_WORD, range(3)),
        out=_SHORT[out.dtype],
        out_pairs=_multiples(out, 2 * out.element_size(), range(3)),
        dependent=machine.capability >= (9, 0) and p.enable_pdl is not False,
    )
    return fit(form, machine.capability)


def fit(form: Config, capability: tuple[int, int]) -> Config:
    """The configuration with as many rows, blocks per multiprocessor and stages as the chip has memory for."""
    spills = form.row_tiles == 4 and capability in SPILLS_64_ROWS
    for blocks in (2, 1) if form.row_tiles == 1 else (1,):
        room = min(SHARED_LIMIT[capability], SHARED_PER_SM[capability] // blocks - 1024)
        # Four row tiles leave no registers to wait in: values come later, or there are two row tiles.
        for stages in range(MOST_STAGES, 2 if form.row_tiles == 4 else 1, -1):
            config = _dealt(replace(form, stages=stages, blocks_per_sm=blocks))
            if config.shared_bytes <= room and not spills:
                return config
    if form.row_tiles == 4:
        return fit(replace(form, row_tiles=2), capability)
    raise ValueError(f"no configuration of {form} fits into the shared memory of sm_{capability[0]}{capability[1]}")


def _dealt(form: Config) -> Config:
    """With as many tokens for each warp as its rows leave registers for."""
    one = replace(form, token_blocks=1)
    few = one.row_groups > 1 or (one.row_tiles == 1 and one.widened)
    return replace(one, token_blocks=2) if few else one


def plan_for(problem: Problem, out: torch.Tensor, machine: Machine, *, teams: int | None = None) -> Plan:
    """The plan. `teams` is how many groups of blocks share the work; by default as many as run at once."""
    p = problem
    config = configure(p, out, machine)
    requests, rows = (p.batch * p.q_len, p.num_heads) if p.is_sparse else (p.batch, p.q_len * p.num_heads)
    tiles = -(-rows // config.rows)
    at_once = machine.multiprocessors * config.blocks_per_sm
    one_each = max(machine.multiprocessors // tiles, 1)
    if teams is None:
        most_units = requests * (-(-(room_of(p) + 1) // config.tile) + OVERHEAD)
        few = most_units <= ALONE * one_each  # teams are dealt the same, whether more of them are started or not
        teams = max(min(one_each if few else at_once // tiles, -(-most_units // AT_LEAST)), 1)
    rows_per_block = min(-(-requests * rows // (16 * machine.multiprocessors)), rows)
    at_once_in_merge = MERGE_THREADS_AT_ONCE * machine.multiprocessors
    fitting = (merge for merge in MERGES if requests * rows * merge[0] * merge[1] <= at_once_in_merge)
    slices, merge_threads = next(fitting, MERGES[-1])
    merge_blocks = requests * -(-rows // rows_per_block) * slices
    piece = PIECE_KEYS // config.tile if p.deterministic else 0
    pieces = -(-room_of(p) // PIECE_KEYS) if p.deterministic else 0
    return Plan(
        config,
        requests,
        rows,
        tiles,
        teams,
        rows_per_block,
        slices,
        merge_threads,
        merge_blocks,
        piece,
        pieces,
        one_each,
    )


def room_of(problem: Problem) -> int:
    """Tokens that a row of the table is taken to hold; a row that sees more becomes NaN.

    In deterministic mode no more than max_seq_len: it sizes scratch, and a length beyond it must not write past that.
    """
    p = problem
    room = min(p.top_k if p.is_sparse else p.table_width * p.page_size, LONGEST)
    return min(room, p.max_seq_len) if p.deterministic else room


def reciprocal(divisor: int) -> tuple[int, int]:
    """(factor, shift) such that n // divisor is the upper half of 2n * factor, shifted right; for n below 2**31.

    factor: 2**(31 + shift) / divisor rounded up, which fits into 32 bits; as a signed number. (Granlund and
    Montgomery, "Division by invariant integers using multiplication", 1994.)
    """
    shift = (divisor - 1).bit_length()
    factor = -(-(1 << (31 + shift)) // divisor)
    return factor - (1 << 32), shift


def _steps(tensor: torch.Tensor, *axes: int) -> list[int]:
    return [tensor.stride(axis) * tensor.element_size() for axis in axes]


def arguments(
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    plan: Plan,
    scratch: tuple[int, int, int],
) -> dict[str, Any]:
    """Every argument of both kernels, by name; scratch: the addresses of its three parts."""
    p = problem
    factor, shift = reciprocal(p.page_size)
    query_request, query_token, query_head = _steps(p.query, 0, 1, 2)
    page_step, token_step = _steps(p.kv_cache, 0, 1)
    table_steps = _steps(p.block_tables, *range(p.block_tables.ndim))
    out_request, out_token, out_head = _steps(out, 0, 1, 2)
    lse_request, lse_token, lse_head = (0, 0, 0) if lse is None else _steps(lse, 0, 1, 2)
    scales: dict[str, Any] = {}
    for name, scale in (("bmm1", p.bmm1_scale), ("bmm2", p.bmm2_scale)):
        is_tensor = isinstance(scale, torch.Tensor)
        scales[name] = 0.0 if is_tensor else scale
        scales[f"{name}_at"] = scale.data_ptr() if isinstance(scale, torch.Tensor) else 0
    return scales | {
        "query": p.query.data_ptr(),
        "query_request": query_request,
        "query_token": query_token,
        "query_head": query_head,
        "pool": p.kv_cache.data_ptr(),
        "page_step": page_step,
        "token_step": token_step,
        "entries": p.num_pages * (p.page_size if p.is_sparse else 1),
        "page_size": p.page_size,
        "page_factor": factor,
        "page_shift": shift,
        "table": p.block_tables.data_ptr(),
        "table_request": table_steps[0],
        "table_token": table_steps[1] if p.is_sparse else 0,
        "table_column": table_steps[-1],
        "table_wide": int(p.block_tables.dtype is torch.int64),
        "columns": p.table_width,
        "lengths": p.seq_lens.data_ptr(),
        "length_step": _steps(p.seq_lens, 0)[0],
        "length_wide": int(p.seq_lens.dtype is torch.int64),
        "room": room_of(p),
        "out": out.data_ptr(),
        "out_request": out_request,
        "out_token": out_token,
        "out_head": out_head,
        "lse": 0 if lse is None else lse.data_ptr(),
        "lse_request": lse_request,
        "lse_token": lse_token,
        "lse_head": lse_head,
        "lse_unit": 1.0 if p.lse_base == "base2" else LN_2,
        "sinks": 0 if p.sinks is None else p.sinks.data_ptr(),
        "parts": scratch[0],
        "part_lse": scratch[1],
        "begins": scratch[2],
        "requests": plan.requests,
        "q_len": p.q_len,
        "heads": p.num_heads,
        "teams": plan.teams,
        "one_each": min(plan.one_each, plan.teams),
        "tiles": plan.tiles,
        "overhead": plan.overhead,
        "at_least": plan.at_least,
        "piece": plan.piece,
        "pieces": plan.pieces,
        "rows_per_block": plan.rows_per_block,
        "slices": plan.slices,
        "threads": plan.merge_threads,
    }
