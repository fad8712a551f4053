"""Launching: compiled once per kind of call, then a few microseconds of Python per call, no wait for the device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from mla.backends.trtllm_gen import interpreter
from mla.backends.trtllm_gen.arguments import R, is_aligned, most_keys, shape_of
from mla.backends.trtllm_gen.decode_kernel import decode_kernel
from mla.backends.trtllm_gen.merge_kernel import merge_kernel
from mla.problem import Problem

INTERPRETED_SMS = (
    5  # multiprocessors that the interpreter pretends to have: splits, whole items and idle teams all occur
)
_NAMES = ("request", "token", "head")
DECODE_NUMBERS = (
    *(f"stride_q_{name}" for name in _NAMES), "stride_page", "stride_table_request", "stride_table_token",
    "stride_table", "stride_lens", "stride_sink", *(f"stride_out_{name}" for name in _NAMES),
    *(f"stride_lse_{name}" for name in _NAMES), "items", "teams", "tiles", "width", "num_pages",
)  # fmt: skip
MERGE_NUMBERS = (
    "stride_lens", "stride_sink", *(f"stride_out_{name}" for name in _NAMES),
    *(f"stride_lse_{name}" for name in _NAMES), "items", "teams", "tiles",
)  # fmt: skip
_FIRST_IN_CAPTURE = (
    "backend 'trtllm-gen' would compile and load a kernel now, while the current stream is being captured into a CUDA "
    "graph, where that is not allowed; call mla.warmup(...) with the same arguments before the capture"
)


class Launch:
    """Both kernels for one kind of call: ready to be started with new addresses."""

    def __init__(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None, *, aligned: bool) -> None:
        device = problem.device
        self.interpreted = device.type == "cpu"
        if self.interpreted:
            interpreter.repair()
        else:
            index: int | None = device.index
            self.index = torch.cuda.current_device() if index is None else index
        self.pdl = problem.enable_pdl is not False and (problem.capability or (0, 0)) >= (9, 0)
        sms = INTERPRETED_SMS if self.interpreted else _multiprocessors(device)
        self.shape = shape_of(problem, out, lse, sms=sms, pdl=self.pdl, aligned=aligned)
        strides, self.deterministic, self.most = self.shape.strides, problem.deterministic, most_keys(problem)
        self.rows = self.shape.part_rows(problem)
        self.decode_numbers = tuple(strides[name] for name in DECODE_NUMBERS)
        self.merge_numbers = tuple(strides[name] for name in MERGE_NUMBERS)
        if not self.interpreted and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_FIRST_IN_CAPTURE)
        tile, merge = self.shape.tile, self.shape.merge
        kernel: Any = decode_kernel
        if tile.hopper:
            from mla.backends.trtllm_gen.hopper_kernel import hopper_kernel as kernel
        like = torch.empty(16, dtype=torch.float32, device=device)  # what stands for scratch while compiling
        decode, merged = self._arguments(problem, out, lse, like, like, self.most)
        make = self._interpret if self.interpreted else self._compile
        self.decode = make(kernel, decode, self.shape.decode_grid, self.shape.decode_constants, tile.warps)
        self.merge = make(merge_kernel, merged, self.shape.merge_grid, self.shape.merge_constants, merge.warps)

    def __call__(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        rows, most = self.rows, self.most
        if self.deterministic:  # here alone max_seq_len matters
            rows, most = self.shape.part_rows(problem), most_keys(problem)
        scratch = _scratch(problem, rows)
        part: Any = scratch.data_ptr()
        part_lse: Any = part + rows * R * 4
        if part % 16:
            part, part_lse = part + 16 - part % 16, part_lse + 16 - part % 16
        if self.interpreted:
            numbers = scratch[-scratch.data_ptr() % 16 :][: rows * (R + 1) * 4].view(torch.float32)
            part, part_lse = numbers[: rows * R], numbers[rows * R :]
        decode, merge = self._arguments(problem, out, lse, part, part_lse, most)
        self.decode(*decode)
        self.merge(*merge)

    def _arguments(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor | None, part: Any, part_lse: Any, most: int
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What is passed to the two kernels, in the order of their parameters, without the constants."""
        at_lse = part_lse if lse is None else lse  # a pointer that nobody follows
        sinks = part_lse if p.sinks is None else p.sinks
        return (
            (p.query, p.kv_cache, p.block_tables, p.seq_lens, out, at_lse, sinks, p.bmm1_scale, p.bmm2_scale, part,
             part_lse, *self.decode_numbers, most),
            (part, part_lse, p.seq_lens, out, at_lse, sinks, p.bmm2_scale, *self.merge_numbers, most),
        )  # fmt: skip

    def _interpret(
        self, kernel: Any, arguments: tuple[Any, ...], grid: int, constants: dict[str, Any], warps: int
    ) -> Callable[..., None]:
        def start(*given: Any) -> None:
            kernel[(grid,)](*given, **constants)

        return start

    def _compile(
        self, kernel: Any, arguments: tuple[Any, ...], grid: int, constants: dict[str, Any], warps: int
    ) -> Callable[..., None]:
        """The kernel loaded on its device, as a function of its arguments."""
        options = {"num_warps": warps} | ({"launch_pdl": True} if self.pdl else {})
        with torch.cuda.device(self.index):
            compiled = kernel.run(*arguments, grid=(grid,), warmup=True, **constants, **options)
            compiled = compiled.result() if hasattr(compiled, "result") else compiled
            compiled._init_handles()
        tail = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        run, function, metadata, index = compiled.run, compiled.function, compiled.packed_metadata, self.index
        stream_of = torch._C._cuda_getCurrentRawStream

        def start(*given: Any) -> None:
            run(grid, 1, 1, stream_of(index), function, metadata, None, None, None, *given, *tail)

        return start


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _scratch(problem: Problem, rows: int) -> torch.Tensor:
    """Bytes for parts of so many rows and their lse, with room to align them: the workspace if it is large enough."""
    workspace, needed = problem.workspace, rows * (R + 1) * 4 + 15
    if workspace is not None and workspace.nbytes >= needed:
        return workspace.view(-1).view(torch.uint8) if workspace.dtype is not torch.uint8 else workspace
    return torch.empty(needed, dtype=torch.uint8, device=problem.device)  # ordered on the current stream


class Launcher:
    """Finds or makes the launch for a problem."""

    MOST = 4096  # kinds of calls that are remembered; then all are forgotten, and looked up in Triton's own cache again

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Launch] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __call__(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        launch = self.find(problem, out, lse)
        if launch.interpreted or torch.cuda.current_device() == launch.index:
            launch(problem, out, lse)
        else:
            with torch.cuda.device(launch.index):
                launch(problem, out, lse)

    def find(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> Launch:
        """The launch, compiled now if this kind of call is new."""
        kind = _kind(problem, out, lse) if problem.kind is None else problem.kind
        key = (  # the compiled code may count on these three being aligned, and on no other address
            kind,
            problem.query.data_ptr() % 16 == 0,
            problem.kv_cache.data_ptr() % 16 == 0,
            out.data_ptr() % 16 == 0,
        )
        launch = self._known.get(key)
        if launch is None:
            launch = Launch(problem, out, lse, aligned=is_aligned(problem, out))
            with self._lock:
                if len(self._known) >= self.MOST:
                    self._known.clear()
                self._known[key] = launch
        return launch


def _kind(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[Any, ...]:
    """All that a launch depends on, for a problem that no call has made."""
    tensors = (problem.query, problem.kv_cache, problem.block_tables, problem.seq_lens, problem.sinks, out, lse)
    return (
        problem.device, problem.top_k, problem.lse_base, problem.enable_pdl, problem.deterministic,
        isinstance(problem.bmm1_scale, torch.Tensor), isinstance(problem.bmm2_scale, torch.Tensor),
        *(None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors),
    )  # fmt: skip
