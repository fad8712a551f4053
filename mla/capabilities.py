"""What a backend can do, as data. The same data refuses a problem, fills the tables and picks the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla.checks import DTYPE_PAIRS, OUT_DTYPES, names, short
from mla.problem import Problem


@dataclass(frozen=True)
class Capabilities:
    """The claims of one backend. The defaults claim the whole contract on any device.

    Attributes:
        dtype_pairs: (query, cache) dtypes.
        out_dtypes: dtypes of the output.
        device_types: torch device types ("cpu", "cuda"); None is every one.
        compute_capabilities: (major, minor) of the NVIDIA GPUs it runs on; None is no limit.
        dense: whether it takes dense calls (`sparse_mla_top_k=0`).
        sparse: whether it takes sparse ones.
        sinks: whether it takes sinks.
        lse: whether it can write the log-sum-exp.
        deterministic: whether it can promise bits that do not depend on batch mates, B or max_seq_len.
        max_q_len: largest Q; None is no limit.
        max_heads: largest H; None is no limit.
        page_sizes: the page sizes it accepts; None is every one.
    """

    dtype_pairs: frozenset[tuple[torch.dtype, torch.dtype]] = DTYPE_PAIRS
    out_dtypes: tuple[torch.dtype, ...] = OUT_DTYPES
    device_types: tuple[str, ...] | None = None
    compute_capabilities: tuple[tuple[int, int], ...] | None = None
    dense: bool = True
    sparse: bool = True
    sinks: bool = True
    lse: bool = True
    deterministic: bool = True
    max_q_len: int | None = None
    max_heads: int | None = None
    page_sizes: tuple[int, ...] | None = None

    def refusals(self, problem: Problem) -> list[str]:
        """Every reason why these capabilities do not cover `problem`, with both sides; empty when they do."""
        p, why = problem, []
        if self.device_types is not None and p.device.type not in self.device_types:
            why.append(f"the tensors are on {p.device}; it runs on {' or '.join(self.device_types)}")
        if self.compute_capabilities is not None and p.capability not in self.compute_capabilities:
            runs_on = ", ".join(f"sm_{major}{minor}" for major, minor in self.compute_capabilities)
            gpu = "no NVIDIA GPU" if p.capability is None else f"sm_{p.capability[0]}{p.capability[1]}"
            why.append(f"the device is {gpu}; it runs on {runs_on}")
        if (p.query.dtype, p.kv_cache.dtype) not in self.dtype_pairs:
            pairs = ", ".join(sorted(f"{short(q)}/{short(kv)}" for q, kv in self.dtype_pairs))
            why.append(f"query/cache dtypes are {short(p.query.dtype)}/{short(p.kv_cache.dtype)}; it takes {pairs}")
        if p.out_dtype not in self.out_dtypes:
            why.append(f"out is {short(p.out_dtype)}; it writes {names(self.out_dtypes)}")
        if p.is_sparse and not self.sparse:
            why.append(f"the call is sparse (top {p.top_k}); it does dense only")
        if not p.is_sparse and not self.dense:
            why.append("the call is dense (sparse_mla_top_k=0); it does sparse only")
        if p.sinks is not None and not self.sinks:
            why.append("sinks are given; it has none")
        if p.wants_lse and not self.lse:
            why.append("the log-sum-exp is asked for; it returns none")
        if p.deterministic and not self.deterministic:
            why.append("deterministic=True is asked for; its bits may depend on batch mates")
        if self.max_q_len is not None and p.q_len > self.max_q_len:
            why.append(f"there are {p.q_len} query tokens per request; it takes at most {self.max_q_len}")
        if self.max_heads is not None and p.num_heads > self.max_heads:
            why.append(f"there are {p.num_heads} heads; it takes at most {self.max_heads}")
        if self.page_sizes is not None and p.page_size not in self.page_sizes:
            why.append(f"the page size is {p.page_size}; it takes {', '.join(map(str, self.page_sizes))}")
        return why
