"""Which backend runs a problem, and why every other one does not."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from mla import plugins, registry
from mla.backend import Backend
from mla.errors import BackendBroken, BackendUnsupported, ReferenceFallbackWarning
from mla.problem import Problem

_DATACENTER_BLACKWELL = ("trtllm-gen", "reference")
_CONSUMER_BLACKWELL = ("xqa", "trtllm-gen", "reference")
_OTHER_NVIDIA = ("trtllm-gen", "xqa", "reference")
_ANYTHING_ELSE = ("reference",)

AUTO_ORDER: dict[tuple[int, int], tuple[str, ...]] = {
    (8, 0): _OTHER_NVIDIA,
    (8, 6): _OTHER_NVIDIA,
    (8, 7): _OTHER_NVIDIA,
    (8, 9): _OTHER_NVIDIA,
    (9, 0): _OTHER_NVIDIA,
    (10, 0): _DATACENTER_BLACKWELL,
    (10, 3): _DATACENTER_BLACKWELL,
    (12, 0): _CONSUMER_BLACKWELL,
    (12, 1): _CONSUMER_BLACKWELL,
}
"""What backend="auto" tries, by compute capability, in order. A CPU and anything not listed get the reference."""

_warned_devices: set[str] = set()


@dataclass(frozen=True)
class Verdict:
    """What one backend says of one problem.

    Attributes:
        name: the backend.
        state: "accepts", "refused" (it was not made for this problem) or "broken" (it could not be loaded or asked).
        reasons: full sentences; empty when it accepts.
    """

    name: str
    state: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Where a call would run, and why; `print` it.

    Attributes:
        asked_for: the `backend` argument.
        backend: the name that would run, or None when the call would raise.
        order: the names considered, in order.
        verdicts: name -> `Verdict`, for every known backend.
        problem: the checked problem.
    """

    asked_for: str
    backend: str | None
    order: tuple[str, ...]
    verdicts: dict[str, Verdict]
    problem: Problem = field(repr=False)

    @property
    def reasons(self) -> dict[str, tuple[str, ...]]:
        """name -> why that backend cannot run it, of those that refuse and those that are broken."""
        return {name: verdict.reasons for name, verdict in self.verdicts.items() if verdict.reasons}

    def __str__(self) -> str:
        chosen = "none: the call raises" if self.backend is None else self.backend
        lines = [f"problem: {self.problem.describe()}", f"backend={self.asked_for!r} runs: {chosen}"]
        for name, verdict in self.verdicts.items():
            aside = "" if name in self.order else f"not considered by backend={self.asked_for!r}; by name: "
            lines.append(f"  {name}: {aside}{verdict.state}")
            lines += [f"    {reason}" for reason in verdict.reasons]
        return "\n".join(lines)


def order_for(problem: Problem) -> tuple[str, ...]:
    """The names that "auto" tries for the problem's device, in order."""
    return _ANYTHING_ELSE if problem.capability is None else AUTO_ORDER.get(problem.capability, _ANYTHING_ELSE)


def ask(name: str, problem: Problem) -> Verdict:
    """What the backend says of the problem. A backend that cannot be loaded or asked is a verdict, too."""
    try:
        reasons = registry.load(name).why_not(problem)
    except BackendBroken as error:
        return Verdict(name, "broken", (str(error),))
    except Exception as error:  # somebody else's code may raise anything; it is reported under that backend's name
        if name not in tuple(registry.backends()):  # by comparison: what is no string may have no hash
            raise
        sentence = f"backend {name!r} is broken: its why_not raised {type(error).__name__}: {error}"
        plugins.warn(sentence)
        return Verdict(name, "broken", (sentence,))
    return Verdict(name, "refused" if reasons else "accepts", tuple(reasons))


def select(problem: Problem, name: str) -> Backend:
    """The backend that runs the problem: the one named, or the first of "auto"'s order that accepts it.

    Raises:
        TypeError, ValueError: `name` is not a known name.
        BackendUnsupported: the named backend refuses, or under "auto" every one does; carries every reason.
        BackendBroken: the named backend could not be loaded or asked.
    """
    refused: dict[str, tuple[str, ...]] = {}
    for candidate in order_for(problem) if name == "auto" else (name,):
        verdict = ask(candidate, problem)
        if verdict.state == "accepts":
            if candidate == "reference" and name == "auto":
                _warn_of_fallback(problem, refused)
            return registry.load(candidate)
        if verdict.state == "broken" and name != "auto":
            raise BackendBroken(verdict.reasons[0])
        refused[candidate] = verdict.reasons
    raise BackendUnsupported(name, refused)


def chosen_by_kind(problem: Problem, name: str, chosen: Backend) -> bool:
    """Whether every call of the problem's kind gets `chosen`: it, and each that "auto" asked before, have a `bind`."""
    if not hasattr(chosen, "bind"):
        return False
    tried = order_for(problem) if name == "auto" else (name,)
    known = registry.backends()
    asked = [one for one in tried[: tried.index(chosen.name)] if known[one].broken is None]
    return all(hasattr(registry.load(one), "bind") for one in asked)


def explain_problem(problem: Problem, name: str) -> Explanation:
    """Where the problem would run, with every known backend's verdict; runs nothing."""
    order = order_for(problem) if name == "auto" else (name,)
    verdicts = {known: ask(known, problem) for known in (*order, *(n for n in registry.backends() if n not in order))}
    chosen = next((known for known in order if verdicts[known].state == "accepts"), None)
    return Explanation(name, chosen, order, verdicts, problem)


def _warn_of_fallback(problem: Problem, refused: dict[str, tuple[str, ...]]) -> None:
    device = str(problem.device)
    if problem.device.type == "cpu" or device in _warned_devices:
        return
    _warned_devices.add(device)
    why = "".join(f" {name}: {'; '.join(reasons)}." for name, reasons in refused.items())
    warnings.warn(
        f"backend='auto' runs the reference on {device}: it is an oracle, not a kernel.{why}",
        ReferenceFallbackWarning,
        stacklevel=4,
    )
