"""The gate: nobody is timed whose answer is wrong.

Two looks at every output. All requests are compared with a plain float32 answer; what is reported is the one that is
furthest off. A handful of them are brought before the project's judge, with the float64 answer and the budget that
comes from the number formats (see `mla.testing.budget`). A backend must keep the budget. A kernel of others promised
nothing of the kind: it is timed while it is right to a few percent, and the report marks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mla.bench.floors import D, R
from mla.bench.inputs import SCALE, Inputs
from mla.problem import Problem
from mla.reference import decode
from mla.reference.precision import ieee_matmul
from mla.testing import Budget, Mismatch, assert_close, budget

WRONG = 5e-2
"""The relative error at which an output is wrong, whoever made it."""


@dataclass(frozen=True, eq=False)
class Judged:
    """One request with all that the judge wants to know of it."""

    request: int
    problem: Problem
    exact: tuple[torch.Tensor, torch.Tensor]
    allowed: Budget


@dataclass(frozen=True, eq=False)
class Answer:
    """What is right for a case.

    Attributes:
        out: [B, Q, H, R] float32, computed plainly.
        judged: the requests that go before the judge.
    """

    out: torch.Tensor
    judged: tuple[Judged, ...]


@dataclass(frozen=True)
class Judgement:
    """What became of one output.

    Attributes:
        verdict: "right", "near" (outside the budget, and right to a few percent), or "wrong".
        reason: why it is not "right", or "".
        relative_error: |out - answer| / |answer| of the worst request; None when it is not finite, or the shape wrong.
        error_over_budget: of the worst element judged; None likewise.
    """

    verdict: str
    reason: str
    relative_error: float | None
    error_over_budget: float | None

    @property
    def within_budget(self) -> bool:
        return self.verdict == "right"


def answer(inputs: Inputs) -> Answer:
    """The right output of a case: every request in float32, a few in float64 with their budgets."""
    case = inputs.case
    out = torch.empty(case.batch, case.q_len, case.heads, R, device=inputs.device)
    with ieee_matmul(inputs.device):
        for b in range(case.batch):
            out[b] = _plain(inputs, b)
    return Answer(out, tuple(_judged(inputs, b) for b in spread(case.lengths)))


def spread(lengths: tuple[int, ...]) -> list[int]:
    """The requests to judge: the first, the last, the longest, the shortest, and two in between."""
    last = len(lengths) - 1
    return sorted({0, last, lengths.index(max(lengths)), lengths.index(min(lengths)), last // 3, 2 * last // 3})


def judge(out: object, right: Answer, must_hold: bool) -> Judgement:
    """Hold an output to the answer.

    Args:
        out: [B, Q, H, R] or, when Q is 1, [B, H, R].
        must_hold: whether an element outside its budget makes it wrong, as for our own backends.
    """
    expected = right.out.shape
    if not isinstance(out, torch.Tensor) or out.numel() != expected.numel() or out.device != right.out.device:
        got = list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        return Judgement("wrong", f"the output is {got}; expected {list(expected)}", None, None)
    whole = out if must_hold else out.to(torch.bfloat16)  # others return the dtype of the query
    whole = whole.reshape(expected)
    relative = _relative_error(whole, right.out)
    share, reason = _hold_to_budget(whole, right)
    if relative is None or relative > WRONG:
        told = "not finite" if relative is None else f"{relative:.2g}"
        return Judgement("wrong", f"the relative error of the worst request is {told}", relative, share)
    if not reason:
        return Judgement("right", "", relative, share)
    return Judgement("wrong" if must_hold else "near", reason, relative, share)


def _relative_error(out: torch.Tensor, right: torch.Tensor) -> float | None:
    errors = (out.float() - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)  # [B]
    worst = float(errors.nan_to_num(nan=math.inf).max())
    return worst if math.isfinite(worst) else None


def _hold_to_budget(out: torch.Tensor, right: Answer) -> tuple[float | None, str]:
    """(the largest error over its budget, the judge's complaint or "")."""
    share, reason = 0.0, ""
    for one in right.judged:
        got = out[one.request, None]
        exact, allowed = one.exact[0], one.allowed.out
        share = max(share, float(((got.double() - exact).abs() / allowed).nan_to_num(nan=math.inf).max()))
        try:
            assert_close(got, one.problem, exact=one.exact, allowed=one.allowed)
        except Mismatch as mismatch:
            complaint = "; ".join(line.strip() for line in str(mismatch).splitlines()[:3])
            reason = reason or f"request {one.request} alone: {complaint}"
    return (share if math.isfinite(share) else None), reason


def _slots(inputs: Inputs, request: int) -> torch.Tensor:
    """[n] the token slots of a request, those that its last query token sees."""
    case = inputs.case
    n = case.visible(request, case.q_len - 1)
    if inputs.slots is not None:
        return inputs.slots[request, -1, :n].long()
    position = torch.arange(n, device=inputs.device)
    return inputs.tables[request].long()[position // case.page_size] * case.page_size + position % case.page_size


def _plain(inputs: Inputs, request: int) -> torch.Tensor:
    """[Q, H, R] of one request, from the formula."""
    case = inputs.case
    keys = inputs.pool.view(-1, D)[_slots(inputs, request)].float()  # [n, D]
    made = []
    for t in range(case.q_len):
        seen = keys[: case.visible(request, t)]
        scores = SCALE * (inputs.query[request, t].float() @ seen.T)  # [H, n]
        made.append(torch.softmax(scores, dim=-1) @ seen[:, :R])
    return torch.stack(made)


def _judged(inputs: Inputs, request: int) -> Judged:
    """The request as a problem of its own. A dense one is told as the list of all its tokens, which means the same."""
    case = inputs.case
    slots = _slots(inputs, request).to(torch.int32)
    listed = {"block_tables": slots.expand(1, case.q_len, -1), "sparse_mla_top_k": len(slots)}
    alone = {"query": inputs.query[request, None], "seq_lens": inputs.lengths[request, None]}
    problem = Problem.from_call(**(inputs.arguments(None) | listed | alone))
    exact = decode(problem, torch.float64)
    return Judged(request, problem, exact, budget(problem, *exact))
