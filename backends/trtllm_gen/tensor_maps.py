"""The pool as the copy engine of Hopper chips (TMA) sees it: one matrix of rows, of which 64 are copied as a box."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla.problem import Problem

KEYS = 64  # rows of a box
COLUMNS = (512, 64)  # of latents and of rope parts, which have a map each
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float8_e4m3fn: tl.float8e4nv}
_MOST_ROWS = 1 << 31  # they are counted in 32 bits, with a sign


def pool_rows(problem: Problem) -> int:
    """Rows of the pool as one matrix, between pages too; 0 if it can't be one, or if blocks are no boxes of it."""
    p = problem
    page, token = p.kv_cache.stride(0), p.kv_cache.stride(1)
    if p.is_sparse or p.page_size % KEYS or not p.num_pages or not token or page % token:
        return 0
    rows = (p.num_pages - 1) * (page // token) + p.page_size
    return rows if rows < _MOST_ROWS else 0


def layout_of(columns: int, dtype: tl.dtype) -> gl.NVMMASharedLayout:
    """How a box of so many columns lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([KEYS, columns], dtype)


def type_of(columns: int, dtype: tl.dtype) -> str:
    """Triton's name for the type of such a map."""
    return f"tensordesc<{dtype}[{KEYS}, {columns}],{layout_of(columns, dtype)!r}>"


class TensorMaps:
    """The two maps of pools of one kind, made anew when a pool lies elsewhere than the last.

    A map holds an address, and nothing that keeps memory alive.
    """

    def __init__(self, rows: int, stride: int, dtype: torch.dtype) -> None:
        self._shape, self._strides, self._dtype = [rows, sum(COLUMNS)], [stride, 1], dtype
        self._encode: Callable[[TensorDescriptor, Any], list[Any]] | None = None
        self._meta: list[Any] = []
        self._last: tuple[int, tuple[Any, ...]] = (0, ())

    def descriptors(self, address: int) -> tuple[TensorDescriptor, ...]:
        """The maps as Triton takes them when it compiles."""
        pool, dtype = _Address(address, self._dtype), DTYPES[self._dtype]
        return tuple(
            TensorDescriptor(pool, self._shape, self._strides, [KEYS, columns], layout_of(columns, dtype))
            for columns in COLUMNS
        )

    def launch_of(self, compiled: Any) -> Callable[..., None]:
        """The launch of a compiled kernel which takes the maps as `at` gives them.

        Triton's own encodes both maps at every launch; the one below it takes encoded ones.
        """
        from triton.backends.nvidia import driver

        launch: Callable[..., None] = compiled.run.launch
        below: Callable[..., None] | None = None
        if inspect.isfunction(launch):
            below = inspect.getclosurevars(launch).nonlocals.get("launcher")
        encode = getattr(driver, "make_tensordesc_arg", None)
        self._last = (0, ())
        if below is None or encode is None:
            self._encode = None
            return launch
        self._encode, self._meta = encode, compiled.metadata.tensordesc_meta
        return below

    def at(self, address: int) -> tuple[Any, ...]:
        """What the launch takes for a pool at that address."""
        known, arguments = self._last
        if known != address:
            arguments = self.descriptors(address)
            if self._encode is not None:
                encoded = map(self._encode, arguments, self._meta)
                arguments = tuple(number for numbers in encoded for number in numbers)
            self._last = (address, arguments)
        return arguments


class _Address:
    """What a descriptor wants to know of a tensor."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address
