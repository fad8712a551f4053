"""From a problem to two launches: compiled once, prepared once per form of problem, then some microseconds a call.

What a call of a known form costs: a key from shapes and strides, a dozen addresses into one buffer, two launches.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from typing import Any, Protocol

import torch

from mla.backends.xqa.config import THREADS, Config
from mla.backends.xqa.plan import (
    MERGE_THREADS,
    Machine,
    Plan,
    argument_names,
    argument_type,
    arguments,
    plan_for,
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
        sizes = plan.scratch_bytes
        self.scratch_bytes = sum(sizes) + 16
        self.scratch_offsets = (0, sizes[0], sizes[0] + sizes[1])
        names = [*_VARYING, *(name for name in known if name not in _VARYING)]
        self.values = ctypes.create_string_buffer(8 * len(names))  # one 8-byte place for each argument
        at = {name: ctypes.addressof(self.values) + 8 * i for i, name in enumerate(names)}
        for i, name in enumerate(names):
            struct.pack_into(_PACK_ONE[argument_type(name)], self.values, 8 * i, known[name])
        self._tables = []
        launches = []
        forms = {
            "decode": (plan.decode_blocks, THREADS, plan.config.shared_bytes, False),
            "merge": (plan.merge_blocks, MERGE_THREADS, plan.merge_shared_bytes, plan.config.dependent),
        }
        for kernel, (blocks, threads, shared_bytes, dependent) in forms.items():
            addresses = [at[name] for name in argument_names(kernel)]
            table = (ctypes.c_void_p * len(addresses))(*addresses)
            self._tables.append(table)
            launches.append(
                gpu.launcher(
                    kernels[kernel], blocks, threads, shared_bytes, ctypes.addressof(table), dependent=dependent
                )
            )
        self.decode, self.merge = launches


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
            self._prepare(_form(problem, out, lse), problem, out, lse)

    def run(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Launch both kernels on the current stream. The GPU is the current device.

        Raises:
            FirstCallInCapture: something must be compiled first, and the stream is being captured.
        """
        p = problem
        form = _form(p, out, lse)
        with self._lock:
            self.gpu.ensure_context()
            prepared = self._prepared.get(form)
            if prepared is None:
                prepared = self._prepare(form, p, out, lse)
            scratch, base = _scratch(p, prepared.scratch_bytes)
            parts, part_lse, begins = prepared.scratch_offsets
            bmm1: Any = p.bmm1_scale
            bmm2: Any = p.bmm2_scale
            bmm1_at = bmm2_at = 0
            if isinstance(bmm1, torch.Tensor):
                bmm1, bmm1_at = 0.0, bmm1.data_ptr()
            if isinstance(bmm2, torch.Tensor):
                bmm2, bmm2_at = 0.0, bmm2.data_ptr()
            _PACK.pack_into(
                prepared.values,
                0,
                p.query.data_ptr(),
                p.kv_cache.data_ptr(),
                p.block_tables.data_ptr(),
                p.seq_lens.data_ptr(),
                out.data_ptr(),
                0 if lse is None else lse.data_ptr(),
                0 if p.sinks is None else p.sinks.data_ptr(),
                base + parts,
                base + part_lse,
                base + begins,
                bmm1_at,
                bmm2_at,
                bmm1,
                bmm2,
            )
            stream = self.gpu.stream()
            prepared.decode(stream)
            prepared.merge(stream)
        del scratch  # stream-ordered: the allocator gives it to nobody before the kernels are done

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
        cache.data_ptr() & 15,
        query.data_ptr() & 3,
        out.data_ptr() & 7,
    )


def _scratch(p: Problem, size: int) -> tuple[torch.Tensor, int]:
    """(what keeps the memory alive, its address at a multiple of 16): the workspace if it is large enough."""
    workspace = p.workspace
    if workspace is None or workspace.nbytes < size:
        workspace = torch.empty(size, dtype=torch.uint8, device=p.query.device)
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
