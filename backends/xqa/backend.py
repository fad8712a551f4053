"""backend="xqa": what it claims, why it refuses, and how it runs."""

from __future__ import annotations

import torch

from mla.backends.xqa.config import SHARED_LIMIT
from mla.capabilities import Capabilities
from mla.checks import DTYPE_PAIRS, E4M3, WIDE
from mla.problem import Problem

E4M3_SINCE = (8, 9)
LONGEST = 1 << 30  # tokens of one request
MOST_SLOTS = (1 << 31) - 1
MOST_UNITS = (1 << 31) - 1


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
        why = []
        room = p.top_k if p.is_sparse else p.table_width * p.page_size
        longest = min(room, p.max_seq_len)
        if longest > LONGEST:
            why.append(f"requests may be {longest} tokens long (max_seq_len, block_tables); it takes {LONGEST}")
        requests = p.batch * (p.q_len if p.is_sparse else 1)
        units = requests * (longest // 16 + 4)
        if units > MOST_UNITS:
            work = f"{requests} requests of up to {longest} tokens are {units} pieces of work"
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
        from mla.backends.xqa.launcher import launcher_for

        device = problem.device
        if device.index == torch.cuda.current_device():
            launcher_for(device).run(problem, out, lse)
        else:
            with torch.cuda.device(device):
                launcher_for(device).run(problem, out, lse)

    def warmup(self, problem: Problem) -> None:
        """Compile and load what the problem needs, on its device, and launch nothing."""
        from mla.backends.xqa.launcher import launcher_for

        p = problem
        rows = (p.batch, p.q_len, p.num_heads)
        with torch.cuda.device(p.device):
            out, lse = p.out, p.lse
            if out is None:
                out = torch.empty(*rows, p.kv_lora_rank, dtype=p.out_dtype, device=p.device)
            if lse is None and p.wants_lse:
                lse = torch.empty(rows, dtype=torch.float32, device=p.device)
            launcher_for(p.device).warmup(p, out, lse)


backend = XqaBackend()
