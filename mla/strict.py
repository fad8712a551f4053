"""The strict mode: checks that read device values, and therefore wait for the device.

Off by default. On inside `with mla.strict():`, or in the whole process with the environment variable MLA_STRICT=1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from mla.problem import Problem

_strict: ContextVar[bool] = ContextVar("mla_strict", default=os.environ.get("MLA_STRICT", "0") not in ("", "0"))


def is_strict() -> bool:
    """Whether calls check device values now."""
    return _strict.get()


@contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Within the block, every call first reads lengths, page ids and slots on the host and raises on a wrong one.

    It waits for the device, so it is for debugging, and it cannot be used inside a CUDA graph capture. The environment
    variable MLA_STRICT=1 does the same for the whole process. `mla.strict(False)` switches it off for a block.

    Args:
        enabled: whether calls within the block are checked.

    Example:
        >>> from mla.strict import is_strict
        >>> with strict():
        ...     is_strict()
        True
    """
    token = _strict.set(enabled)
    try:
        yield
    finally:
        _strict.reset(token)


def check_values(problem: Problem) -> None:
    """Read the device values of a problem and raise on the first that breaks the contract. Waits for the device.

    Args:
        problem: a checked problem; `mla.Problem.from_call(...)` makes one from the arguments of the call.

    Raises:
        ValueError: a negative length; a length above max_seq_len or above what the table can hold; a page id outside
            the pool within a request's length; a sparse slot at or past the end of the pool (negative ones are legal
            holes); a scale that is not finite; a sink that is NaN or infinite. Names the row and column.
        RuntimeError: the current stream is being captured.
    """
    if problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "strict checks read device values, which a CUDA graph capture forbids; leave strict mode to capture"
        )
    for name, scale in (("bmm1_scale", problem.bmm1_scale), ("bmm2_scale", problem.bmm2_scale)):
        if isinstance(scale, torch.Tensor) and not torch.isfinite(scale).all():
            raise ValueError(f"{name} holds {scale.item()}; expected a finite number")
    if problem.sinks is not None:
        sinks = problem.sinks.cpu()
        bad = sinks.isnan() | (sinks == math.inf)
        if bad.any():
            (head,) = _first(bad)
            raise ValueError(f"sinks[{head}] is {sinks[head]}; expected a finite number, or -inf for no sink")
    lengths = problem.seq_lens.cpu().to(torch.int64)  # [B]
    _check_lengths(problem, lengths)
    if problem.is_sparse:
        _check_slots(problem, lengths)
    else:
        _check_pages(problem, lengths)


def _first(bad: torch.Tensor) -> list[int]:
    index: list[int] = bad.nonzero()[0].tolist()
    return index


def _check_lengths(problem: Problem, lengths: torch.Tensor) -> None:
    limits = {
        "a length >= 0": lengths < 0,
        f"at most max_seq_len = {problem.max_seq_len}": lengths > problem.max_seq_len,
    }
    if not problem.is_sparse:
        width = problem.table_width * problem.page_size
        what = f"at most {width}, what {problem.table_width} table columns of page size {problem.page_size} can hold"
        limits[what] = lengths > width
    for expected, bad in limits.items():
        if bad.any():
            (row,) = _first(bad)
            raise ValueError(f"seq_lens[{row}] is {lengths[row]}; expected {expected}")


def _check_pages(problem: Problem, lengths: torch.Tensor) -> None:
    table = problem.block_tables.cpu()  # [B, W]
    pages_used = (lengths + problem.page_size - 1) // problem.page_size  # [B]
    used = torch.arange(table.shape[1], device="cpu") < pages_used[:, None]
    bad = used & ((table < 0) | (table >= problem.num_pages))
    if bad.any():
        row, column = _first(bad)
        raise ValueError(
            f"block_tables[{row}, {column}] is page {table[row, column]}; expected 0 <= page < {problem.num_pages}, "
            f"the pages of kv_cache (row {row} has length {lengths[row]}, so its first {pages_used[row]} columns count)"
        )


def _check_slots(problem: Problem, lengths: torch.Tensor) -> None:
    slots = problem.block_tables.cpu()  # [B, Q, K]
    visible = lengths[:, None] - problem.q_len + 1 + torch.arange(problem.q_len, device="cpu")  # [B, Q]
    read = torch.arange(problem.top_k, device="cpu") < visible[..., None]
    pool = problem.num_pages * problem.page_size
    bad = read & (slots >= pool)
    if bad.any():
        row, token, column = _first(bad)
        raise ValueError(
            f"block_tables[{row}, {token}, {column}] is slot {slots[row, token, column]}; expected a slot < {pool}, "
            f"the token slots of kv_cache, or a negative number for a hole"
        )
