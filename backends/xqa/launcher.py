"""From a problem to two launches: compiled once, prepared once per form of problem, then some microseconds a call.

What a call of a known form costs: a key from shapes and strides, a dozen addresses into one buffer, two launches.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from mla.backends.xqa.config import THREADS, Config
from mla.backends.xqa.plan import (
    QUERY_WORD,
    Machine,
    Plan,
    argument_names,
    argument_type,
    arguments,
    plan_for,
    room_of,
)
from mla.problem import Problem

MOST_FORMS = 1024  # prepared calls that are kept
_ADDRESSES = ("query", "pool", "table", "lengths", "out", "lse", "sinks", "parts", "part_lse", "begins")
_VARYING = (*_ADDRESSES, "bmm1_at", "bmm2_at", "bmm1", "bmm2")
_PACK = struct.Struct(f"{len(_VARYING) - 2}qf4xf4x")
_PACK_ONE = {"I64": "q", "I32": "i4x", "F32": "f4x"}


class Gpu(Protocol):
    """What the launcher needs of a GPU: `driver.Driver`, or something else in tests."""

    machine: Machine

    def ensure_context(self) -> None: ...
    def is_capturing(self) -> bool: ...
    def stream(self) -> int: ...
    def load(self, config: Config, kernel: str, shared_bytes: int) -> Any: ...
    def launcher(
        self, kernel: Any, blocks: int, threads: int, shared_bytes: int, parameters: int, *, dependent: bool
    ) -> Any: ...


class FirstCallInCapture(RuntimeError):
    """A kernel would have to be compiled or loaded while a CUDA graph is captured, which must not be done."""


class _Prepared:
    """One form of problem on one GPU: the plan, a buffer with every argument, and the two launches."""

    def __init__(self, gpu: Gpu, kernels: dict[str, Any], plan: Plan, known: dict[str, Any]) -> None:
        self.plan = plan
        self._stream = gpu.stream
        sizes = plan.scratch_bytes
        self._scratch_bytes = sum(sizes) + 16
        self._scratch_offsets = (0, sizes[0], sizes[0] + sizes[1])
        names = [*_VARYING, *(name for name in known if name not in _VARYING)]
        self._values = ctypes.create_string_buffer(8 * len(names))  # one 8-byte place for each argument
        at = {name: ctypes.addressof(self._values) + 8 * i for i, name in enumerate(names)}
        for i, name in enumerate(names):
            struct.pack_into(_PACK_ONE[argument_type(name)], self._values, 8 * i, known[name])
        self._tables = []
        launches = []
        forms = {
            "decode": (plan.decode_blocks, THREADS, plan.config.shared_bytes, False),
            "merge": (plan.merge_blocks, plan.merge_threads, plan.merge_shared_bytes, plan.config.dependent),
        }
        for kernel, (blocks, threads, shared_bytes, dependent) in forms.items():
            addresses = [at[name] for name in argument_names(kernel)]
            table = (ctypes.c_void_p * len(addresses))(*addresses)
            self._tables.append(table)
            where = ctypes.addressof(table)
            launches.append(gpu.launcher(kernels[kernel], blocks, threads, shared_bytes, where, dependent=dependent))
        self._decode, self._merge = launches

    def launch(
        self,
        query: int,
        cache: int,
        tables: int,
        lengths: int,
        out: int,
        lse: int,
        sinks: torch.Tensor | None,
        bmm1: Any,
        bmm2: Any,
        workspace: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        """Both kernels, with these addresses; scales are numbers or tensors. One thread at a time."""
        bmm1_at = bmm2_at = 0
        if isinstance(bmm1, torch.Tensor):
            bmm1, bmm1_at = 0.0, bmm1.data_ptr()
        if isinstance(bmm2, torch.Tensor):
            bmm2, bmm2_at = 0.0, bmm2.data_ptr()
        scratch, base = _scratch(workspace, self._scratch_bytes, device)
        parts, part_lse, begins = self._scratch_offsets
        _PACK.pack_into(
            self._values,
            0,
            query,
            cache,
            tables,
            lengths,
            out,
            lse,
            0 if sinks is None else sinks.data_ptr(),
            base + parts,
            base + part_lse,
            base + begins,
            bmm1_at,
            bmm2_at,
            bmm1,
            bmm2,
        )
        stream = self._stream()
        self._decode(stream)
        self._merge(stream)
        del scratch  # stream-ordered: the allocator gives it to nobody before the kernels are done


class Launcher:
    """Everything that one GPU needs to run problems; safe for use by several threads."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._lock = threading.RLock()
        self._kernels: dict[tuple[Config, str], Any] = {}
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}

    def warmup(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Compile, load and prepare what the problem needs; launch nothing."""
        with self._lock:
            self.gpu.ensure_context()
            self._find(problem, out, lse)

    def run(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Launch both kernels on the current stream. The GPU is the current device.

        Raises:
            FirstCallInCapture: something must be compiled first, and the stream is being captured.
        """
        p = problem
        with self._lock:
            self.gpu.ensure_context()
            self._find(p, out, lse).launch(
                p.query.data_ptr(),
                p.kv_cache.data_ptr(),
                p.block_tables.data_ptr(),
                p.seq_lens.data_ptr(),
                out.data_ptr(),
                0 if lse is None else lse.data_ptr(),
                p.sinks,
                p.bmm1_scale,
                p.bmm2_scale,
                p.workspace,
                p.device,
            )

    def bind(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> Callable[..., None]:
        """`run` for calls that differ from this one in addresses, contents, floats and max_seq_len at most.

        What is prepared assumes some alignment of three addresses, and in deterministic mode the size of scratch; a
        call for which that does not hold goes the long way.
        """
        p, lock, ensure_context = problem, self._lock, self.gpu.ensure_context
        with lock:
            ensure_context()
            prepared = self._find(p, out, lse)
        device, launch = p.device, prepared.launch
        in_pieces = prepared.plan.piece > 0
        cache_mask, query_mask, out_mask = _masks(prepared.plan.config)

        def bound(
            query: torch.Tensor,
            kv_cache: torch.Tensor,
            block_tables: torch.Tensor,
            seq_lens: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor | None,
            sinks: torch.Tensor | None,
            bmm1_scale: float | torch.Tensor,
            bmm2_scale: float | torch.Tensor,
            workspace: torch.Tensor | None,
            max_seq_len: int,
        ) -> None:
            query_at, cache_at, out_at = query.data_ptr(), kv_cache.data_ptr(), out.data_ptr()
            if (cache_at & cache_mask) | (query_at & query_mask) | (out_at & out_mask) or in_pieces:
                changed: dict[str, Any] = {"query": query, "kv_cache": kv_cache, "block_tables": block_tables}
                changed |= {"seq_lens": seq_lens, "sinks": sinks, "bmm1_scale": bmm1_scale, "bmm2_scale": bmm2_scale}
                changed |= {"workspace": workspace, "max_seq_len": max_seq_len}
                self.run(replace(p, **changed), out, lse)
                return
            with lock:
                ensure_context()
                launch(
                    query_at,
                    cache_at,
                    block_tables.data_ptr(),
                    seq_lens.data_ptr(),
                    out_at,
                    0 if lse is None else lse.data_ptr(),
                    sinks,
                    bmm1_scale,
                    bmm2_scale,
                    workspace,
                    device,
                )

        return bound

    def _find(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> _Prepared:
        form = _form(problem, out, lse)
        return self._prepared.get(form) or self._prepare(form, problem, out, lse)

    def _prepare(
        self, form: tuple[Any, ...], problem: Problem, out: torch.Tensor, lse: torch.Tensor | None
    ) -> _Prepared:
        plan = plan_for(problem, out, self.gpu.machine)
        wanted = {"decode": plan.config.shared_bytes, "merge": plan.merge_shared_bytes}
        kernels = {}
        for kernel, shared_bytes in wanted.items():
            known = self._kernels.get((plan.config, kernel))
            if known is None:
                if self.gpu.is_capturing():
                    raise FirstCallInCapture(
                        f"the {kernel} kernel for {problem.describe()} is not compiled yet, and while a CUDA graph is "
                        "captured it cannot be: make the same call once before the capture"
                    )
                known = self._kernels[plan.config, kernel] = self.gpu.load(plan.config, kernel, shared_bytes)
            kernels[kernel] = known
        prepared = _Prepared(self.gpu, kernels, plan, arguments(problem, out, lse, plan, (0, 0, 0)))
        if len(self._prepared) >= MOST_FORMS:
            self._prepared.clear()
        self._prepared[form] = prepared
        return prepared


def _masks(config: Config) -> tuple[int, int, int]:
    """The bits of the addresses of cache, query and out that a configuration takes to be 0."""
    pair = 8 if config.out == "fp32" else 4
    return 15 if config.aligned else 0, QUERY_WORD - 1 if config.aligned else 0, pair - 1 if config.out_pairs else 0


def _form(p: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[Any, ...]:
    """All that a prepared call depends on: everything but addresses (beyond their alignment) and contents."""
    query, cache, table = p.query, p.kv_cache, p.block_tables
    return (
        query.dtype,
        cache.dtype,
        out.dtype,
        table.dtype,
        p.seq_lens.dtype,
        p.batch,
        p.q_len,
        p.num_heads,
        p.num_pages,
        p.page_size,
        p.top_k,
        table.shape,
        query.stride(),
        cache.stride(),
        out.stride(),
        table.stride(),
        p.seq_lens.stride(),
        None if lse is None else lse.stride(),
        p.lse_base,
        p.enable_pdl,
        room_of(p) if p.deterministic else None,
        cache.data_ptr() & 15,
        query.data_ptr() & (QUERY_WORD - 1),
        out.data_ptr() & 7,
    )


def _scratch(workspace: torch.Tensor | None, size: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """(what keeps the memory alive, its address at a multiple of 16): the workspace if it is large enough."""
    if workspace is None or workspace.nbytes < size:
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
    return workspace, (workspace.data_ptr() + 15) & ~15


_launchers: dict[int, Launcher] = {}
_making = threading.Lock()


def launcher_for(device: torch.device) -> Launcher:
    """The launcher of a CUDA device, made on first use."""
    index = device.index
    found = _launchers.get(index)
    if found is None:
        with _making:
            found = _launchers.get(index)
            if found is None:
                from mla.backends.xqa.driver import Driver

                found = _launchers[index] = Launcher(Driver(torch.device("cuda", index)))
    return found


def _forget() -> None:
    """A forked child can use nothing of its parent's GPU."""
    _launchers.clear()
    _making._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget)
