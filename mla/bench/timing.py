"""How a call is timed: medians, the L2 cache flushed before every repetition, by CUDA events; a plain clock on a CPU.

`eager` is from call to end of work as the stream sees it, `graph` the same for the replay of a CUDA graph. `host` is
what the call costs the Python thread: the wall time of calls that nobody waits for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

Run = Callable[[], torch.Tensor]

WARM_UP = 5
FEWEST = 5
LONGEST_SECONDS = 1.0  # what one median may take, unless the fewest repetitions take longer
HOST_CALLS = 20  # few enough for the launch queue
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of one call, and the output that each replay writes."""

    replay: Callable[[], None]
    out: torch.Tensor


class Timer:
    """Times calls on one device.

    Attributes:
        device: where the calls run. repetitions: of which the median is taken; slow calls get fewer.
        flush_bytes: written before each repetition, at least twice the L2 cache; 0 on a CPU.
        clean: whether they are read instead. Lines that were written must go to memory before a call can have their
            places, and its time pays for that.
    """

    def __init__(self, device: torch.device, repetitions: int, *, clean: bool = False) -> None:
        self.device, self.repetitions, self.clean = device, repetitions, clean
        self.on_gpu = device.type == "cuda"
        self.flush_bytes = 0
        if self.on_gpu:
            cache: int = torch.cuda.get_device_properties(device).L2_cache_size
            self.flush_bytes = max(FLUSH_BYTES, 2 * cache)
            self._filler = torch.zeros(self.flush_bytes // 8, dtype=torch.int64, device=device)

    def wait(self) -> None:
        """Until the device has done all that it was given. Raises what went wrong there."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def median_us(self, run: Callable[[], object], repetitions: int | None = None) -> float:
        """Median microseconds of a call."""
        one = self._once_us(run)
        wanted = repetitions or self.repetitions
        fitting = int(LONGEST_SECONDS * 1e6 / max(one, 1.0))
        count = max(min(wanted, FEWEST), min(wanted, fitting))
        if not self.on_gpu:
            return statistics.median(self._once_us(run) for _ in range(count))
        for _ in range(min(WARM_UP, count)):
            run()
        pairs = [(_event(), _event()) for _ in range(count)]
        for start, end in pairs:
            self._flush()
            start.record()
            run()
            end.record()
        self.wait()
        return 1e3 * statistics.median(float(start.elapsed_time(end)) for start, end in pairs)

    def _flush(self) -> None:
        if self.clean:
            self._filler.sum()
        else:
            self._filler.zero_()

    def _once_us(self, run: Callable[[], object]) -> float:
        """Wall time of one call that is waited for."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return 1e6 * (time.perf_counter() - start)

    def host_us(self, run: Callable[[], object]) -> float | None:
        """Microseconds that a call keeps the Python thread: the best of three rows of calls. None on a CPU."""
        if not self.on_gpu:
            return None
        calls = max(1, min(HOST_CALLS, int(LONGEST_SECONDS * 1e6 / self._once_us(run) / 3)))
        rows = []
        for _ in range(3):
            self.wait()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            rows.append(1e6 * (time.perf_counter() - start) / calls)
        self.wait()
        return min(rows)

    def capture(self, run: Run) -> Captured:
        """The call as a CUDA graph. Raises whatever capturing raises: not every call can be captured.

        A call that waits for the device is found before it is captured, as far as PyTorch sees it: a capture that fails
        half-way leaves the allocator in a state in which no other capture can begin, and mending that is an attempt.
        """
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        self.wait()
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph, pool=pool):
                out = run()
        except Exception:
            torch.cuda.set_stream(stream)
            end = getattr(torch._C, "_cuda_endAllocateToPool", None)
            if end is not None:
                with suppress(RuntimeError):
                    end(stream.device_index, pool)
            raise
        self.wait()
        return Captured(graph.replay, out)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
