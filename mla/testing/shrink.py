"""Making a failing case small, and looking for one at random. Both need hypothesis, which is an extra."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from mla.testing.case import Case
from mla.testing.profile import Profile

if TYPE_CHECKING:
    from hypothesis import settings

EFFORT = 400  # examples a shrink may draw before it starts to shrink
PATIENCE = 10.0  # seconds after which it takes what it has


def available() -> bool:
    """Whether hypothesis is installed."""
    return importlib.util.find_spec("hypothesis") is not None


def quiet(examples: int) -> settings:
    """Settings for a search inside a program: so many examples, nothing stored.

    They are the same every time in one installation. In another they may not be: hypothesis tries constants that it
    finds in the code that it takes for the program's own.
    """
    from hypothesis import HealthCheck, settings

    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The simplest case like `case` that still fails: each field as in the default, as here, or smaller.

    Without hypothesis the case comes back as it is.
    """
    if not available():
        return case
    from hypothesis import find
    from hypothesis import strategies as st
    from hypothesis.errors import HypothesisException

    whole = Case()

    def smaller(name: str) -> st.SearchStrategy[Any]:
        value, plain = getattr(case, name), getattr(whole, name)
        if name == "lengths":
            return _lengths(value)
        if isinstance(value, int) and name not in ("cache_rank", "out_rank", "seed"):
            low = 1 if name in ("q_len", "heads", "page_size") or (name == "top_k" and value) else 0
            return st.sampled_from(_steps(low, value))
        return st.sampled_from([plain, value]) if value != plain else st.just(value)

    def _lengths(value: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
        if not value:
            return st.just(())
        one = st.sampled_from(sorted({step for length in value for step in _steps(0, length)}))
        return st.lists(one, min_size=1, max_size=min(len(value), 6)).map(tuple)

    @st.composite
    def like(draw: st.DrawFn) -> Case | None:
        try:
            return replace(case, **{f.name: draw(smaller(f.name)) for f in fields(Case)})
        except ValueError:  # fields that do not go together, such as out_rank 3 with two tokens
            return None

    best, end = case, time.monotonic() + PATIENCE

    def still_fails(candidate: Case | None) -> bool:
        nonlocal best
        if candidate is None or time.monotonic() > end or not fails(candidate):
            return False
        if _size(candidate) <= _size(best):
            best = candidate
        return True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            find(like(), still_fails, settings=quiet(EFFORT))
        except HypothesisException:  # nothing smaller fails, or a failure that comes and goes: `best` is what was seen
            return best
    return best


def _steps(low: int, high: int) -> list[int]:
    """`low`, a few numbers on the way, and `high`: enough to shrink along, few enough to hit."""
    return sorted({n for n in (low, low + 1, low + 2, high // 4, high // 2, high - 1, high) if low <= n <= high}) or [
        high
    ]


def _size(case: Case) -> tuple[int, ...]:
    """How much a reader has to take in: requests and keys first, then rows, then fields that are not default."""
    changed = sum(getattr(case, f.name) != f.default for f in fields(case))
    return len(case.lengths), sum(case.lengths), case.q_len * case.heads, changed, case.page_size


class _CrashedError(Exception):
    """Ends a search at once: after a fault on the GPU every further case would fail."""


def search(
    profile: Profile, judge: Callable[[Case], tuple[str, str] | None], examples: int
) -> tuple[int, Case | None, tuple[str, str] | None]:
    """(how many random cases within the profile were judged, the simplest wrong one, what is wrong with it).

    `judge` gives (kind, text), or None for a right answer. Without hypothesis, or with no examples, none is judged.
    """
    if not available() or not examples:
        return 0, None, None
    from hypothesis import find
    from hypothesis.errors import HypothesisException, NoSuchExample

    from mla.testing.strategies import claimed_cases

    judged = 0
    last: tuple[Case, tuple[str, str]] | None = None

    def wrong(case: Case) -> bool:
        nonlocal judged, last
        if last is not None and last[1][0] == "crashed":
            raise _CrashedError  # hypothesis asks once more before it gives up
        judged += 1
        found = judge(case)
        if found is not None:
            last = case, found
            if found[0] == "crashed":
                raise _CrashedError
        return found is not None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = find(claimed_cases(profile), wrong, settings=quiet(examples))
            return judged, found, judge(found) or ("error", "it was wrong once and not again: it is not repeatable")
        except NoSuchExample:
            return judged, None, None
        except (_CrashedError, HypothesisException):  # HypothesisException: a failure that comes and goes
            return (judged, *last) if last is not None else (judged, None, None)
