"""What a backend is: an object with a name, reasons to refuse, and a way to run."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from mla.problem import Problem


@runtime_checkable
class Backend(Protocol):
    """The whole interface between `mla` and a kernel.

    A backend may also have

    * `capabilities: mla.Capabilities`, from which tables and tests are made; `why_not` is then usually
      `return self.capabilities.refusals(problem)`;
    * `warmup(problem, out, lse)`, which compiles and loads what the problem needs and runs nothing;
    * `bind(problem, out, lse)`, which returns `run(query, kv_cache, block_tables, seq_lens, out, lse, sinks,
      bmm1_scale, bmm2_scale, workspace, max_seq_len)` for later calls that differ from this one in addresses, device
      values, floats and max_seq_len at most. Such calls are checked no more, and `why_not` is not asked again: have
      `bind` only if `why_not` looks at nothing that they can differ in.
    """

    @property
    def name(self) -> str:
        """The name it is asked for by, `backend="..."`."""

    def why_not(self, problem: Problem) -> list[str]:
        """Every reason why it cannot run this legal problem, as full sentences; empty when it can.

        Looks at shapes, dtypes and the device's capability only: no GPU work, no device value, and no import of a
        toolchain that may be absent.

        Args:
            problem: a legal problem on any device.

        Returns:
            The reasons.
        """

    def run(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Write every element of `out` [B, Q, H, R] and, if given, of `lse` [B, Q, H] fp32 in `problem.lse_base`.

        Called only when `why_not` was empty and there is at least one row. `out` has last stride 1, `lse` any strides.
        Stream-ordered on the current stream of `problem.device`, under its device guard, with no host sync.

        Args:
            problem: what to compute.
            out: [B, Q, H, R] in `problem.out_dtype`.
            lse: [B, Q, H] float32, or None when it is not wanted.
        """
