"""Launching: compiled once per kind of call, then a few microseconds of Python per call, no wait for the device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from mla.backends.trtllm_gen import interpreter
from mla.backends.trtllm_gen.arguments import R, Shape, is_aligned, most_keys, shape_of
from mla.backends.trtllm_gen.decode_kernel import decode_kernel
from mla.backends.trtllm_gen.merge_kernel import merge_kernel
from mla.problem import Problem

INTERPRETED_SMS = (
    5  # multiprocessors that the interpreter pretends to have: splits, whole items and idle teams all occur
)
_FIRST_IN_CAPTURE = (
    "backend 'trtllm-gen' would compile and load a kernel now, while the current stream is being captured into a CUDA "
    "graph, where that is not allowed; call mla.warmup(...) with the same arguments before the capture"
)

Arguments = tuple[Any, ...]


class Launch:
    """Both kernels for one kind of call: ready to be started with new addresses."""

    def __init__(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None, *, aligned: bool) -> None:
        device = problem.device
        self.interpreted = device.type == "cpu"
        if self.interpreted:
            interpreter.repair()
        else:
            self.index = torch.cuda.current_device() if device.index is None else device.index
        self.pdl = problem.enable_pdl is not False and (problem.capability or (0, 0)) >= (9, 0)
        sms = INTERPRETED_SMS if self.interpreted else _multiprocessors(device)
        self.shape = shape_of(problem, out, lse, sms=sms, pdl=self.pdl, aligned=aligned)
        self.decode: Callable[..., None]
        self.merge: Callable[..., None]
        if self.interpreted:
            self.decode = self._interpret(decode_kernel, self.shape.decode_grid, self.shape.decode_constants)
            self.merge = self._interpret(merge_kernel, self.shape.merge_grid, self.shape.merge_constants)
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_FIRST_IN_CAPTURE)
        arguments = self._arguments(problem, out, lse, _scratch(problem, self.shape))
        tile, merge = self.shape.tile, self.shape.merge
        kernel: Any = decode_kernel
        if tile.hopper:
            from mla.backends.trtllm_gen.hopper_kernel import hopper_kernel as kernel
        self.decode = self._compile(
            kernel, arguments[0], self.shape.decode_grid, self.shape.decode_constants, tile.warps
        )
        self.merge = self._compile(
            merge_kernel, arguments[1], self.shape.merge_grid, self.shape.merge_constants, merge.warps
        )

    def __call__(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        decode, merge = self._arguments(problem, out, lse, _scratch(problem, self.shape))
        self.decode(*decode)
        self.merge(*merge)

    def _arguments(
        self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None, scratch: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[Arguments, Arguments]:
        """What is passed to the two kernels, in the order of their parameters, without the constants."""
        p, s, (part, part_lse) = problem, self.shape.strides, scratch
        lse = part_lse if lse is None else lse  # a pointer that nobody follows
        sinks = part_lse if p.sinks is None else p.sinks
        most = most_keys(p)
        decode = (
            p.query, p.kv_cache, p.block_tables, p.seq_lens, out, lse, sinks, p.bmm1_scale, p.bmm2_scale, part,
            part_lse,
            s["stride_q_request"], s["stride_q_token"], s["stride_q_head"], s["stride_page"], s["stride_table_request"],
            s["stride_table_token"], s["stride_table"], s["stride_lens"], s["stride_sink"], s["stride_out_request"],
            s["stride_out_token"], s["stride_out_head"], s["stride_lse_request"], s["stride_lse_token"],
            s["stride_lse_head"], s["items"], s["teams"], s["tiles"], s["width"], s["num_pages"], most,
        )  # fmt: skip
        merge = (
            part, part_lse, p.seq_lens, out, lse, sinks, p.bmm2_scale, s["stride_lens"], s["stride_sink"],
            s["stride_out_request"], s["stride_out_token"], s["stride_out_head"], s["stride_lse_request"],
            s["stride_lse_token"], s["stride_lse_head"], s["items"], s["teams"], s["tiles"], most,
        )  # fmt: skip
        return decode, merge

    @staticmethod
    def _interpret(kernel: Any, grid: int, constants: dict[str, Any]) -> Callable[..., None]:
        return lambda *arguments: kernel[(grid,)](*arguments, **constants)

    def _compile(
        self, kernel: Any, arguments: Arguments, grid: int, constants: dict[str, Any], warps: int
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


def _scratch(problem: Problem, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """(parts, their lse), fp32: in the workspace if they fit, else allocated on the current stream."""
    rows = shape.part_rows(problem)
    workspace = problem.workspace
    if workspace is not None:
        skip = -workspace.data_ptr() % 16
        needed = rows * (R + 1) * 4
        if workspace.nbytes >= skip + needed:
            whole = workspace.view(-1).view(torch.uint8)[skip : skip + needed].view(torch.float32)
            return whole[: rows * R], whole[rows * R :]
    whole = torch.empty(rows * (R + 1), dtype=torch.float32, device=problem.device)
    return whole[: rows * R], whole[rows * R :]


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
        aligned = is_aligned(problem, out)
        key = (problem.kind, aligned) if problem.kind is not None else (_kind(problem, out, lse), aligned)
        launch = self._known.get(key)
        if launch is None:
            launch = Launch(problem, out, lse, aligned=aligned)
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
