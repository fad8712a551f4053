"""backend="xqa": what it claims, why it refuses, and how it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mla.backends.xqa.config import LONGEST, SHARED_LIMIT
from mla.capabilities import Capabilities
from mla.checks import DTYPE_PAIRS, E4M3, WIDE
from mla.problem import Problem

if TYPE_CHECKING:
    from mla.backends.xqa.launcher import Launcher

E4M3_SINCE = (8, 9)
SMALLEST_TILE = 32
MOST_SLOTS = (1 << 31) - 1
MOST_UNITS = (1 << 31) - (1 << 20)  # what teams are dealt may be rounded up


class XqaBackend:
    """Tensor-core kernels in Python, compiled by Numba; `mma.sync` only, so they run from sm_80 to sm_121."""

    name = "xqa"
    capabilities = Capabilities(
        dtype_pairs=frozenset(pair for pair in DTYPE_PAIRS if pair[0] not in WIDE),
        device_types=("cuda",),
        compute_capabilities=tuple(SHARED_LIMIT),
    )

    def why_not(self, problem: Problem) -> list[str]:
        """Every reason, the toolchain's among them; on a device that is no CUDA GPU that alone is the reason."""
        p = problem
        if p.device.type != "cuda":
            return Capabilities(device_types=("cuda",)).refusals(p)
        why = self.capabilities.refusals(p)
        if p.kv_cache.dtype is E4M3 and p.capability is not None and p.capability < E4M3_SINCE:
            gpu = f"sm_{p.capability[0]}{p.capability[1]}"
            why.append(f"the cache is float8_e4m3fn and the device is {gpu}; it converts e4m3 from sm_89 on")
        return why + self._too_large(p) + self._toolchain()

    def _too_large(self, p: Problem) -> list[str]:
        """What depends on shapes alone: max_seq_len may differ between calls that are taken for one another."""
        why = []
        room = p.top_k if p.is_sparse else p.table_width * p.page_size
        if room > LONGEST:
            why.append(f"block_tables hold {room} tokens for each request; it counts up to {LONGEST}")
        requests = p.batch * (p.q_len if p.is_sparse else 1)
        units = requests * (room // SMALLEST_TILE + 4)
        if units > MOST_UNITS:
            work = f"{requests} requests with tables of {room} tokens may be {units} pieces of work"
            why.append(f"{work}; it counts up to {MOST_UNITS}")
        slots = p.num_pages * p.page_size
        if p.is_sparse and slots > MOST_SLOTS:
            why.append(f"the pool has {slots} token slots; in sparse mode it addresses up to {MOST_SLOTS}")
        return why

    def _toolchain(self) -> list[str]:
        from mla.backends.xqa import toolchain

        return list(toolchain.missing())

    def run(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Two launches on the current stream of the problem's device. The first call of a form compiles (seconds)."""
        with _guard(problem.device):
            self._launcher(problem.device).run(problem, out, lse)

    def warmup(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Compile and load what such a problem needs, on its device; nothing is launched or written."""
        with _guard(problem.device):
            self._launcher(problem.device).warmup(problem, out, lse)

    def bind(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> Callable[..., None]:
        """A function that runs calls like this one; `why_not` looks at nothing that they can differ in."""
        device = problem.device
        with _guard(device):
            bound = self._launcher(device).bind(problem, out, lse)
        index = device.index
        current_device = torch.cuda.current_device

        def run(*arguments: Any) -> None:
            if current_device() == index:
                bound(*arguments)
            else:
                with torch.cuda.device(device):
                    bound(*arguments)

        return run

    def _launcher(self, device: torch.device) -> Launcher:
        from mla.backends.xqa.launcher import launcher_for

        return launcher_for(device)


def _guard(device: torch.device) -> AbstractContextManager[Any]:
    """Makes the device the current one, where it is not."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


backend = XqaBackend()
