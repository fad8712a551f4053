"""The whole backend on CPU tensors: the same plan, the same arguments, the same kernels, every access checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mla.backends.xqa.config import THREADS
from mla.backends.xqa.emulator.launch import Grid, run_grid
from mla.backends.xqa.emulator.memory import GlobalMemory
from mla.backends.xqa.plan import Machine, Plan, argument_names, arguments, plan_for
from mla.backends.xqa.specialize import KERNELS
from mla.capabilities import Capabilities
from mla.checks import DTYPE_PAIRS, WIDE
from mla.problem import Problem

CONSUMER = Machine((12, 0), 4)
"""An sm_120 with few multiprocessors: small problems are shared among its teams all the same."""

Helpers = dict[str, Callable[..., Any]]


class Emulation:
    """One problem, ready to run: the memory that its kernels may touch, and the two launches.

    Attributes:
        memory: the problem's tensors and scratch, which begins as NaN.
        decode, merge: the launches; run `decode` first.
    """

    def __init__(
        self,
        problem: Problem,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        plan: Plan,
        instead: Helpers | None = None,
    ) -> None:
        p = problem
        self._scratch = [torch.empty(size, dtype=torch.uint8).fill_(0xFF) for size in plan.scratch_bytes]
        parts, part_lse, begins = self._scratch
        inputs = {
            "query": p.query,
            "pool": p.kv_cache,
            "table": p.block_tables,
            "lengths": p.seq_lens,
            "sinks": p.sinks,
        }
        inputs |= {
            name: scale if isinstance(scale, torch.Tensor) else None
            for name, scale in (("bmm1", p.bmm1_scale), ("bmm2", p.bmm2_scale))
        }
        outputs = {"out": out, "lse": lse, "parts": parts, "part_lse": part_lse, "begins": begins}
        self.memory = GlobalMemory()
        for name, tensor in inputs.items():
            self.memory.add(name, tensor)
        for name, tensor in outputs.items():
            self.memory.add(name, tensor, writable=True)
        known = arguments(p, out, lse, plan, (parts.data_ptr(), part_lse.data_ptr(), begins.data_ptr()))

        def grid(kernel: str, blocks: int, threads: int, shared_bytes: int) -> Grid:
            wanted = {name: known[name] for name in argument_names(kernel)}
            function = (instead or {}).get(kernel, KERNELS[kernel])
            return Grid(function, plan.config, wanted, blocks, threads, shared_bytes, instead)

        self.decode = grid("decode", plan.decode_blocks, THREADS, plan.config.shared_bytes)
        self.merge = grid("merge", plan.merge_blocks, plan.merge_threads, plan.merge_shared_bytes)


class EmulatedBackend:
    """A backend like any other, on the CPU, in the emulator.

    Args:
        machine: the GPU whose configuration is taken.
        teams: how many teams share the work; None as on the machine.
        at_least: tiles that a team must have before another joins in; 1 shares as much as it can.
        watch: look for races.
        instead: helpers of the kernels to take in place of those of the same name: experiments, planted bugs.
    """

    name = "xqa-emulated"
    capabilities = Capabilities(
        device_types=("cpu",), dtype_pairs=frozenset(pair for pair in DTYPE_PAIRS if pair[0] not in WIDE)
    )

    def __init__(
        self,
        machine: Machine = CONSUMER,
        *,
        teams: int | None = None,
        at_least: int = 1,
        watch: bool = True,
        instead: Helpers | None = None,
    ) -> None:
        self.machine, self.teams, self.at_least, self.watch, self.instead = machine, teams, at_least, watch, instead

    def why_not(self, problem: Problem) -> list[str]:
        return self.capabilities.refusals(problem)

    def plan(self, problem: Problem, out: torch.Tensor) -> Plan:
        plan = plan_for(problem, out, self.machine, teams=self.teams)
        one_each = plan.teams if self.at_least == 1 else plan.one_each
        return replace(plan, at_least=self.at_least, one_each=one_each)

    def prepare(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None = None) -> Emulation:
        """The problem ready to run, block by block if need be (`launch.run_block`)."""
        return Emulation(problem, out, lse, self.plan(problem, out), self.instead)

    def run(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """As on a GPU: the decode kernel, then the merge kernel."""
        emulation = self.prepare(problem, out, lse)
        run_grid(emulation.decode, emulation.memory, watch=self.watch)
        run_grid(emulation.merge, emulation.memory, watch=self.watch)
