"""Bring a kernel before every property, within what it claims, and say what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mla.testing.case import Case
from mla.testing.compare import Mismatch
from mla.testing.profile import Profile
from mla.testing.properties import PROPERTIES, Function, Property
from mla.testing.shrink import search, shrink

WORDS = {
    "type": "it returns something else than tensors",
    "shape": "a result has the wrong shape",
    "dtype": "a result has the wrong dtype",
    "device": "a result is on the wrong device",
    "nan": "NaN stands where it must not, or is missing where it must stand",
    "inf": "infinities stand where they must not",
    "error": "numbers are further off than any rounding explains",
    "identity": "a buffer that was given is not the one returned",
    "written": "memory is written that must stay as it is",
    "poison": "memory that must not be read changes the result",
    "raised": "it raises on a call that it claims to support",
    "crashed": "it faults on the GPU, and the process can run nothing more",
}
"""The kinds of failure in plain words."""


@dataclass(frozen=True)
class Failure:
    """The first failing case of a property.

    Attributes:
        case: as the suite has it.
        smallest: the simplest that fails the same property, as far as shrinking got.
        kind: a key of `mla.testing.suite.WORDS`.
        text: the judge's message for `smallest`.
    """

    case: Case
    smallest: Case
    kind: str
    text: str


@dataclass(frozen=True)
class Finding:
    """What came out for one property.

    Attributes:
        name: of the property.
        sentence: what the property says holds.
        verdict: "holds", "fails", "not claimed", or "not judged here" (it needs a GPU).
        judged: how many cases were judged.
        skipped: how many need something that is not claimed.
        failed: how many of the judged ones failed.
        failure: the first of them, or None.
        seconds: how long it took.
    """

    name: str
    sentence: str
    verdict: str
    judged: int
    skipped: int
    failed: int
    failure: Failure | None
    seconds: float


@dataclass(frozen=True)
class Report:
    """All findings about one kernel on one device.

    Attributes:
        kernel: its name.
        device: "cpu" or "cuda".
        profile: what it claims.
        findings: one per property, in order.
        about: versions, GPU, date and commit.
    """

    kernel: str
    device: str
    profile: Profile
    findings: tuple[Finding, ...]
    about: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no claimed property fails, and at least one was judged."""
        verdicts = {finding.verdict for finding in self.findings}
        return "fails" not in verdicts and "holds" in verdicts


def outcome(
    judge: Callable[[Function, Case, str], None], function: Function, case: Case, device: str
) -> tuple[str, str] | None:
    """(kind, text) of what is wrong with a kernel on a case, or None."""
    try:
        judge(function, case, device)
    except Mismatch as mismatch:
        return mismatch.kind, str(mismatch)
    except Exception as error:  # the kernel under test may raise anything; raising on a claimed case is a finding
        lost = "CUDA error" in str(error)
        return (
            "crashed" if lost else "raised",
            f"{type(error).__name__}: {str(error).splitlines()[0] if lost else error}",
        )
    return None


def judge_property(
    prop: Property, function: Function, profile: Profile, device: str, *, shrinking: bool = True
) -> Finding:
    """Judge the claimed cases of one property, and shrink the first that fails.

    Args:
        prop: the property.
        function: a function with the keyword arguments of `mla.trtllm_batch_decode_with_kv_cache_mla`.
        profile: what it claims.
        device: "cpu" or "cuda".
        shrinking: make the failing case small (needs hypothesis; without it it comes as it is).

    Returns:
        What came out.
    """
    start = time.perf_counter()
    judged = skipped = failed = 0
    first: tuple[Case, tuple[str, str]] | None = None
    for case in prop.cases:
        adapted = profile.adapt(case, keep_sizes=prop.variable)
        if adapted is None:
            skipped += 1
            continue
        judged += 1
        wrong = outcome(prop.judge, function, adapted, device)
        if wrong is not None:
            failed += 1
            first = first or (adapted, wrong)
            if wrong[0] == "crashed":
                first, shrinking = (adapted, wrong), False
                break
    failure = None
    if first is not None:
        case, (kind, text) = first
        failure = Failure(case, case, kind, text)
        if shrinking:
            failure = _shrunk(failure, prop, function, profile, device)
    verdict = "fails" if failed else "holds" if judged else "not claimed"
    return Finding(prop.name, prop.sentence, verdict, judged, skipped, failed, failure, time.perf_counter() - start)


def _shrunk(failure: Failure, prop: Property, function: Function, profile: Profile, device: str) -> Failure:
    """The failure with the smallest case found that is wrong in the same way, or that faults on the GPU."""
    crashed: list[tuple[Case, str]] = []

    def same_kind(case: Case) -> bool:
        if crashed or profile.why_not(case):
            return False
        wrong = outcome(prop.judge, function, case, device)
        if wrong is not None and wrong[0] == "crashed":
            crashed.append((case, wrong[1]))
        return wrong is not None and wrong[0] == failure.kind

    smallest = shrink(failure.case, same_kind)
    if crashed:
        case, text = crashed[0]
        return Failure(failure.case, case, "crashed", text)
    wrong = outcome(prop.judge, function, smallest, device) if smallest != failure.case else None
    return failure if wrong is None else Failure(failure.case, smallest, *wrong)


def random_problems(function: Function, profile: Profile, device: str, examples: int) -> Finding:
    """Problems that hypothesis draws within the profile, all features mixed; the first failing one comes out shrunk."""
    from mla.testing.judges import right_answer

    start = time.perf_counter()
    judged, found, wrong = search(profile, lambda case: outcome(right_answer, function, case, device), examples)
    failure = None if found is None or wrong is None else Failure(found, found, *wrong)
    verdict = "fails" if failure else "holds" if judged else "not claimed"
    sentence = "problems drawn at random within the profile are right"
    return Finding(
        "random problems", sentence, verdict, judged, 0, int(failure is not None), failure, time.perf_counter() - start
    )


def judge_kernel(
    function: Function,
    profile: Profile,
    device: str = "cpu",
    *,
    examples: int = 100,
    shrinking: bool = True,
    only: tuple[str, ...] = (),
) -> Iterator[Finding]:
    """Every property in turn, then random problems, then what needs a GPU's speed or memory.

    Args:
        function: a function with the keyword arguments of `mla.trtllm_batch_decode_with_kv_cache_mla`.
        profile: what it claims.
        device: "cpu" or "cuda".
        examples: how many random problems; 0 for none.
        shrinking: make failing cases small (needs hypothesis; without it they come as they are).
        only: names of properties to judge; all when empty.

    Returns:
        An iterator over the findings, as they come.

    Raises:
        ValueError: a name in `only` is unknown, or the profile does not claim the device.

    Example:
        >>> import mla
        >>> from mla.testing import Profile
        >>> (finding,) = judge_kernel(mla.trtllm_batch_decode_with_kv_cache_mla, Profile(), only=("mask",))
        >>> finding.name, finding.verdict, finding.failed
        ('mask', 'holds', 0)
    """
    known = [prop.name for prop in PROPERTIES] + ["random problems"]
    for name in only:
        if name not in known:
            raise ValueError(f"property is {name!r}; expected one of {', '.join(known)}")
    if device not in profile.devices:
        raise ValueError(f"device is {device!r}; expected one that the profile claims: {', '.join(profile.devices)}")
    asked = [prop for prop in PROPERTIES if not only or prop.name in only]
    order: list[Property | None] = [prop for prop in asked if not prop.gpu_only]
    if examples and (not only or "random problems" in only):
        order.append(None)  # stands for the random problems
    order += [prop for prop in asked if prop.gpu_only]  # the large ones last: kernels fault there
    lost = False
    for prop in order:
        if prop is None:
            finding = random_problems(function, profile, device, 0 if lost else examples)
        elif lost or (prop.gpu_only and device == "cpu"):
            why = "the process lost its GPU before" if lost else "needs a GPU"
            sentence = f"{prop.sentence} ({why})"
            finding = Finding(prop.name, sentence, "not judged here", 0, len(prop.cases), 0, None, 0.0)
        else:
            finding = judge_property(prop, function, profile, device, shrinking=shrinking and not prop.gpu_only)
        lost = lost or (finding.failure is not None and finding.failure.kind == "crashed")
        yield finding


def with_backend(function: Function, backend: str | None) -> Function:
    """`function` with `backend=` filled in, or itself."""
    if backend is None:
        return function

    def call(**arguments: Any) -> Any:
        return function(**arguments, backend=backend)

    return call
