"""Launching: compiled once per kind of call, then a few microseconds of Python per call, no wait for the device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mla.backends.trtllm_gen import interpreter
from mla.backends.trtllm_gen.arguments import NO_MAPS, R, is_aligned, most_keys, options_of, shape_of, table_keys
from mla.backends.trtllm_gen.configurations import Merge, Tile
from mla.backends.trtllm_gen.decode_kernel import decode_kernel
from mla.backends.trtllm_gen.merge_kernel import merge_kernel
from mla.backends.trtllm_gen.tensor_maps import TensorMaps, pool_rows
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
        self.index: int | None = None
        if self.interpreted:
            interpreter.repair()
        else:
            index: int | None = device.index
            self.index = torch.cuda.current_device() if index is None else index
        self.pdl = problem.enable_pdl is not False and (problem.capability or (0, 0)) >= (9, 0)
        sms = INTERPRETED_SMS if self.interpreted else _multiprocessors(device)
        self.shape = shape_of(problem, out, lse, sms=sms, pdl=self.pdl, aligned=aligned)
        strides, self.deterministic, self.most = self.shape.strides, problem.deterministic, most_keys(problem)
        self.table_keys = table_keys(problem)
        self.rows = self.shape.part_rows(self.most)
        self.decode_numbers = tuple(strides[name] for name in DECODE_NUMBERS)
        self.merge_numbers = tuple(strides[name] for name in MERGE_NUMBERS)
        if not self.interpreted and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_FIRST_IN_CAPTURE)
        tile, merge = self.shape.tile, self.shape.merge
        kernel: Any = decode_kernel
        if tile.hopper:
            from mla.backends.trtllm_gen.hopper_kernel import hopper_kernel as kernel
        like = torch.empty(16, dtype=torch.float32, device=device)  # stands for scratch while compiling
        p, at_lse, sinks = problem, like if lse is None else lse, like if problem.sinks is None else problem.sinks
        decode: tuple[Any, ...] = (
            p.query,
            p.kv_cache,
            p.block_tables,
            p.seq_lens,
            out,
            at_lse,
            sinks,
            p.bmm1_scale,
            p.bmm2_scale,
        )
        decode += (like, like, *self.decode_numbers, self.most)
        self.maps: TensorMaps | None = None
        self.no_maps: tuple[Any, ...] = ()
        if self.shape.decode_constants.get("BOXES"):
            self.maps = TensorMaps(pool_rows(p), p.kv_cache.stride(1), p.kv_cache.dtype)
            decode += self.maps.descriptors(p.kv_cache.data_ptr())
        elif tile.hopper:
            self.no_maps = tuple(NO_MAPS.values())
            decode += self.no_maps
        merged = (like, like, p.seq_lens, out, at_lse, sinks, p.bmm2_scale, *self.merge_numbers, self.most)
        make = self._interpret if self.interpreted else self._compile
        self.decode = make(kernel, decode, self.shape.decode_grid, self.shape.decode_constants, tile, self.maps)
        self.merge = make(merge_kernel, merged, self.shape.merge_grid, self.shape.merge_constants, merge, None)

    def __call__(
        self, query: Any, cache: Any, tables: Any, lens: Any, out: Any, lse: Any, sinks: Any, scale1: Any, scale2: Any,
        workspace: torch.Tensor | None, max_seq_len: int,
    ) -> None:  # fmt: skip
        """Start both kernels on the current stream."""
        rows, most = self.rows, self.most
        if self.deterministic:  # here alone max_seq_len matters
            most = min(self.table_keys, max_seq_len)
            rows = self.shape.part_rows(most)
        needed = rows * (R + 1) * 4 + 15  # 15: room to begin at a multiple of 16
        if workspace is None or workspace.nbytes < needed:
            workspace = torch.empty(needed, dtype=torch.uint8, device=query.device)  # ordered on the current stream
        part: Any = -(-workspace.data_ptr() // 16) * 16
        part_lse: Any = part + rows * R * 4
        if self.interpreted:
            scratch = workspace.view(-1).view(torch.uint8)[part - workspace.data_ptr() :]
            numbers = scratch[: rows * (R + 1) * 4].view(torch.float32)
            part, part_lse = numbers[: rows * R], numbers[rows * R :]
        else:  # a launch takes addresses faster than tensors
            query, cache, tables, lens = query.data_ptr(), cache.data_ptr(), tables.data_ptr(), lens.data_ptr()
            out = out.data_ptr()
            lse = None if lse is None else lse.data_ptr()
            sinks = None if sinks is None else sinks.data_ptr()
            scale1 = scale1 if type(scale1) is float else scale1.data_ptr()
            scale2 = scale2 if type(scale2) is float else scale2.data_ptr()
        if lse is None:
            lse = part_lse  # a pointer that nobody follows
        if sinks is None:
            sinks = part_lse
        last = (most, *(self.no_maps if self.maps is None else self.maps.at(cache)))
        self.decode(
            query, cache, tables, lens, out, lse, sinks, scale1, scale2, part, part_lse, *self.decode_numbers, *last
        )
        self.merge(part, part_lse, lens, out, lse, sinks, scale2, *self.merge_numbers, most)

    def _interpret(
        self, kernel: Any, arguments: tuple[Any, ...], grid: int, constants: dict[str, Any], *_: Any
    ) -> Callable[..., None]:
        def start(*given: Any) -> None:
            kernel[(grid,)](*given, **constants)

        return start

    def _compile(
        self, kernel: Any, arguments: tuple[Any, ...], grid: int, constants: dict[str, Any], how: Tile | Merge,
        maps: TensorMaps | None,
    ) -> Callable[..., None]:  # fmt: skip
        """The kernel loaded on its device, as a function of its arguments; `maps` are among them or None."""
        options = {"num_warps": how.warps} | options_of(how, pdl=self.pdl)
        assert self.index is not None
        with torch.cuda.device(self.index):
            compiled = kernel.run(*arguments, grid=(grid,), warmup=True, **constants, **options)
            compiled = compiled.result() if hasattr(compiled, "result") else compiled
            compiled._init_handles()
        tail = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        run, function, metadata, index = compiled.run, compiled.function, compiled.packed_metadata, self.index
        stream_of = torch._C._cuda_getCurrentRawStream
        if run.global_scratch_size or run.profile_scratch_size:  # of Triton's own; these kernels use none

            def start(*given: Any) -> None:
                run(grid, 1, 1, stream_of(index), function, metadata, None, None, None, *given, *tail)

        else:
            launch, together, early = run.launch, run.launch_cooperative_grid, run.launch_pdl
            if maps is not None:
                launch = maps.launch_of(compiled)

            def start(*given: Any) -> None:
                stream = stream_of(index)
                launch(
                    grid, 1, 1, stream, function, together, early, None, None, metadata, None, None, None, *given, *tail
                )

        return start


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class Launcher:
    """Finds or makes the launch for a problem."""

    MOST = 4096  # kinds of calls that are remembered; then all are forgotten, and looked up in Triton's own cache again

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Launch] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __call__(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        p = problem
        self.bind(problem, out, lse)(
            p.query, p.kv_cache, p.block_tables, p.seq_lens, out, lse, p.sinks, p.bmm1_scale, p.bmm2_scale, p.workspace,
            p.max_seq_len,
        )  # fmt: skip

    def bind(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> Callable[..., None]:
        """A function of addresses, scales and max_seq_len that starts the launch for calls like this one."""
        launch = self.find(problem, out, lse)
        nothing = torch.empty(0)  # what is bound is kept, and must keep no memory of the caller's
        like = replace(
            problem, query=nothing, kv_cache=nothing, block_tables=nothing, seq_lens=nothing, sinks=None,
            bmm1_scale=0.0, bmm2_scale=0.0, workspace=None, out=None, lse=None,
        )  # fmt: skip
        was = _alignment(problem.query, problem.kv_cache, out)
        device_now = (lambda: None) if launch.interpreted else torch._C._cuda_getDevice

        def run(query: Any, cache: Any, tables: Any, lens: Any, out: Any, lse: Any, *rest: Any) -> None:
            chosen = launch
            if _alignment(query, cache, out) != was:
                sinks, scale1, scale2, *_ = rest
                tensors = dict(query=query, kv_cache=cache, block_tables=tables, seq_lens=lens, sinks=sinks)
                chosen = self.find(replace(like, **tensors, bmm1_scale=scale1, bmm2_scale=scale2), out, lse)
            if device_now() == launch.index:
                chosen(query, cache, tables, lens, out, lse, *rest)
            else:
                with torch.cuda.device(launch.index):
                    chosen(query, cache, tables, lens, out, lse, *rest)

        return run

    def find(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> Launch:
        """The launch, compiled now if this kind of call is new."""
        kind = _kind(problem, out, lse) if problem.kind is None else problem.kind
        key = (kind, _alignment(problem.query, problem.kv_cache, out))
        launch = self._known.get(key)
        if launch is None:
            launch = Launch(problem, out, lse, aligned=is_aligned(problem, out))
            with self._lock:
                if len(self._known) >= self.MOST:
                    self._known.clear()
                self._known[key] = launch
        return launch


def _alignment(query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> tuple[int, int, int]:
    """How far from multiples of 16 the three addresses are of which compiled code may count on that."""
    return query.data_ptr() % 16, cache.data_ptr() % 16, out.data_ptr() % 16


def _kind(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[Any, ...]:
    """All that a launch depends on, for a problem that no call has made."""
    tensors = (problem.query, problem.kv_cache, problem.block_tables, problem.seq_lens, problem.sinks, out, lse)
    return (
        problem.device, problem.top_k, problem.lse_base, problem.enable_pdl, problem.deterministic,
        isinstance(problem.bmm1_scale, torch.Tensor), isinstance(problem.bmm2_scale, torch.Tensor),
        *(None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors),
    )  # fmt: skip
