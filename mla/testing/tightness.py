"""How much of the judge's budget honest kernels use: never more than all of it, and enough to show that it can see.

`python -m mla.testing.tightness [PROBLEMS]` draws problems, computes each in every honest way and prints the shares.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict

from mla.progress import progress
from mla.reference import decode
from mla.testing.budget import budget
from mla.testing.build import build
from mla.testing.case import Case
from mla.testing.compare import assert_close
from mla.testing.emulate import honest
from mla.testing.profile import PUBLIC_PAIRS
from mla.testing.shrink import quiet

PROBLEMS = 2000


def shares(case: Case) -> dict[str, float]:
    """Honest way -> the largest error / budget of an output element; empty when no row has a key.

    Raises:
        Mismatch: the judge refuses an honest kernel.
    """
    call = build(case)
    problem = call.problem
    exact = decode(problem)
    allowed = budget(problem, *exact)
    some = allowed.out > 0
    found = {}
    for name, kernel in honest(case.cache, splits=1 + case.seed % 32).items():
        out, lse = call.run(kernel)
        assert_close(out if lse is None else (out, lse), problem, exact=exact, allowed=allowed)
        if some.any():
            error = (out.reshape(exact[0].shape).double() - exact[0]).abs()
            found[f"{case.cache} cache, {name}"] = float((error[some] / allowed.out[some]).max())
    return found


def survey(problems: int = PROBLEMS) -> dict[str, list[float]]:
    """Honest way -> its share of the budget on each of so many random problems, all of them accepted."""
    from hypothesis import given

    from mla.testing.strategies import cases

    found: dict[str, list[float]] = defaultdict(list)

    with progress(problems) as advance:

        @quiet(problems)
        @given(cases(pairs=PUBLIC_PAIRS, max_batch=3, max_q_len=4, max_heads=20))
        def judge(case: Case) -> None:
            advance("random problems")
            for name, share in shares(case).items():
                found[name].append(share)

        judge()
    return dict(found)


def table(found: dict[str, list[float]]) -> str:
    """Median and largest share of each way, as text."""
    lines = [f"{'error / budget':58} {'problems':>8} {'median':>7} {'largest':>7}"]
    for name, values in sorted(found.items()):
        lines.append(f"{name:58} {len(values):8} {statistics.median(values):7.3f} {max(values):7.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(survey(int(sys.argv[1]) if len(sys.argv) > 1 else PROBLEMS)))
