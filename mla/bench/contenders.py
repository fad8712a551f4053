"""Who takes part: registered backends, kernels of others (`peers`), and functions that somebody names.

A contender prepares itself for a case outside of the timed part, and returns the ways in which it can be called. All of
them go through the gate, and the quickest one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mla import dispatch, registry
from mla.bench.inputs import Inputs
from mla.bench.timing import Run
from mla.decode import trtllm_batch_decode_with_kv_cache_mla
from mla.problem import Problem
from mla.testing.target import load

WORKSPACE_BYTES = 256 << 20


class Unable(Exception):
    """A contender cannot do a case; the message says why."""


@dataclass(frozen=True)
class Way:
    """One way to call a contender. `label` tells it from others: "8 splits", or "" where there is one way only."""

    run: Run
    label: str = ""


@dataclass(frozen=True)
class Contender:
    """One that takes part.

    Attributes:
        name: in reports.
        kind: "backend" (it must keep the budget), "peer" (a published kernel) or "own" (named by the user).
        prepare: the ways to call it for these inputs; raises `Unable` when there is none.
        version: of the package it comes from, where that is known.
        graphs: whether it can be captured as a CUDA graph at all.
    """

    name: str
    kind: str
    prepare: Callable[[Inputs], list[Way]] = field(repr=False)
    version: str = ""
    graphs: bool = True


def backend(name: str, workspace_bytes: int = WORKSPACE_BYTES) -> Contender:
    """A registered backend, through the public call with a zeroed workspace.

    Raises:
        ValueError: no backend has that name.
    """
    if name not in registry.backends():
        raise ValueError(f"no backend is named {name!r}; the backends are {', '.join(registry.backends())}")
    graphs = name != "reference"  # an oracle: thousands of small launches
    return Contender(name, "backend", partial(_prepare_backend, name, workspace_bytes), graphs=graphs)


def _prepare_backend(name: str, workspace_bytes: int, inputs: Inputs) -> list[Way]:
    workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=inputs.device) if workspace_bytes else None
    arguments = inputs.arguments(workspace)  # without an lse: the call returns a tensor
    verdict = dispatch.ask(name, Problem.from_call(**arguments))
    if verdict.state != "accepts":
        raise Unable("; ".join(verdict.reasons))
    call: Callable[..., Any] = trtllm_batch_decode_with_kv_cache_mla
    return [Way(partial(call, backend=name, **arguments))]


def default_backends(device: torch.device) -> list[str]:
    """On a GPU every backend but the reference; on a CPU the reference, which is all that runs there."""
    if device.type != "cuda":
        return ["reference"]
    return [name for name in registry.backends() if name != "reference"]  # rows of a broken one say so


def own(target: str, workspace_bytes: int = WORKSPACE_BYTES) -> Contender:
    """A function "module:attr" with the arguments of the call, as `mla check` takes it.

    Raises:
        ValueError, TypeError, ImportError, AttributeError: it cannot be found or called.
    """
    function, _ = load(target)

    def prepare(inputs: Inputs) -> list[Way]:
        workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=inputs.device) if workspace_bytes else None
        return [Way(partial(function, **inputs.arguments(workspace)))]

    return Contender(target, "own", prepare)


def in_order(contenders: Iterable[Contender]) -> list[Contender]:
    """Peers first: what comes after them is told next to the best of them."""
    return sorted(contenders, key=lambda one: one.kind != "peer")
