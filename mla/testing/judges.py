"""How a kernel is brought before a case: once, twice, with poison, with a NaN. Each judge raises or returns nothing.

The exact answer comes from a twin of the call, built on the CPU with the same bits: a kernel cannot disturb what it is
held to, and small problems are quicker there. Far pages are left out of the twin: they move addresses, not answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from mla.problem import Problem
from mla.reference import decode
from mla.testing.budget import Budget, budget
from mla.testing.build import Call, build
from mla.testing.case import Case
from mla.testing.compare import Mismatch, assert_close

Function = Callable[..., Any]
Result = tuple[torch.Tensor, torch.Tensor | None]


def twin(case: Case) -> Call:
    """The same call on the CPU, for the exact answer."""
    return build(replace(case, far_pages=0), "cpu")


@dataclass(frozen=True)
class Answer:
    """What a result is held to.

    Attributes:
        problem: the twin's. exact: (out, lse) in float64. allowed: how far a result may be from it.
    """

    problem: Problem
    exact: tuple[torch.Tensor, torch.Tensor]
    allowed: Budget


_kept: list[dict[Case, Answer]] = []


@contextmanager
def keeping(answers: dict[Case, Answer]) -> Iterator[None]:
    """Within, the answer of a case is worked out once and kept in `answers`: for many kernels on the same cases."""
    _kept.append(answers)
    try:
        yield
    finally:
        _kept.pop()


def answer(case: Case) -> Answer:
    """The right answer of a case, and the budget."""
    kept = _kept[-1] if _kept else {}
    if case not in kept:
        kept[case] = _answer_of(twin(case).problem)
    return kept[case]


def _answer_of(problem: Problem) -> Answer:
    exact = decode(problem, torch.float64)
    return Answer(problem, exact, budget(problem, *exact))


def _run(function: Function, call: Call) -> Result:
    """The result of one call, after seeing that buffers given are returned and nothing else was written."""
    result = call.run(function)
    for name, value in zip(("out", "lse"), result, strict=True):
        given = call.arguments[name]
        if given is not None and value is not given:
            raise Mismatch(
                "identity", name, f"{name} was given and another object was returned; expected the very same one"
            )
        if isinstance(value, torch.Tensor) and value.device != call.problem.device:
            raise Mismatch("device", name, f"{name} is on {value.device}; expected {call.problem.device}")
    touched = call.disturbed()
    if touched:
        raise Mismatch("written", touched[0], f"memory was written that must stay as it is: {', '.join(touched)}")
    return result


def _judge(result: Result, right: Answer) -> None:
    """Hold a result to the answer on the CPU."""
    out, lse = (part.cpu() if isinstance(part, torch.Tensor) else part for part in result)
    actual: Any = out if lse is None else (out, lse)
    assert_close(actual, right.problem, exact=right.exact, allowed=right.allowed)


def right_answer(function: Function, case: Case, device: str) -> None:
    """One call, judged element by element."""
    _judge(_run(function, build(case, device)), answer(case))


def _bits(result: Result) -> list[torch.Tensor]:
    return [part.contiguous().view(torch.uint8).clone() for part in result if part is not None]


def poison_changes_no_bit(function: Function, case: Case, device: str) -> None:
    """The poisoned call is right, and the zero-filled one has its bits (where the kernel repeats its own)."""
    poisoned = _run(function, build(case, device))
    _judge(poisoned, answer(case))
    bits = _bits(poisoned)
    clean = [_bits(_run(function, build(replace(case, unread="zero", tail="zero"), device))) for _ in range(2)]
    repeats = all(torch.equal(a, b) for a, b in zip(*clean, strict=True))
    if repeats and not all(torch.equal(a, b) for a, b in zip(bits, clean[0], strict=True)):
        text = f"bits changed when memory that must not be read held {case.unread} instead of zeros"
        raise Mismatch("poison", "out", text)


def scale_tensors_are_read(function: Function, case: Case, device: str) -> None:
    """Right with the scales as tensors, and right again after they changed in place."""
    call = build(case, device)
    _judge(_run(function, call), answer(case))
    other = replace(case, bmm1=2.5 * case.bmm1, bmm2=0.5 * case.bmm2)
    for name in ("bmm1_scale", "bmm2_scale"):
        call.arguments[name].fill_(getattr(other, name.removesuffix("_scale")))
    _judge(call.run(function), answer(other))


def second_call_is_right(function: Function, case: Case, device: str) -> None:
    """Three calls of one shape with other contents in between, each judged."""
    for seed in (case.seed, case.seed + 1, case.seed):
        right_answer(function, replace(case, seed=seed), device)


def sampled_rows_are_right(function: Function, case: Case, device: str) -> None:
    """One call with very many requests; those around powers of two, and some at random, are judged."""
    out, lse = _run(function, build(case, device))
    edges = [b + d for b in (0, 1 << 15, 1 << 16, case.batch - 1) for d in (-1, 0, 1) if 0 <= b + d < case.batch]
    some = torch.randint(case.batch, (100,), generator=torch.Generator().manual_seed(case.seed))
    rows = torch.cat([torch.tensor(edges), some])
    p = twin(case).problem
    query, tables, lengths = p.query[rows], p.block_tables[rows], p.seq_lens[rows]
    part = replace(p, query=query, block_tables=tables, seq_lens=lengths, batch=len(rows))
    there = rows.to(out.device)
    _judge((out[there], None if lse is None else lse[there]), _answer_of(part))
    if not out.isfinite().all():
        raise Mismatch("nan", "out", "a row outside the sample is not finite")


def visible_nan_stays_in_its_rows(function: Function, case: Case, device: str) -> None:
    """NaN in the last key of the first request, which its last query token alone sees."""
    if case.top_k or not case.lengths or not case.lengths[0]:
        right_answer(function, case, device)  # there is no such key; shrinking comes here
        return
    call, exact = build(case, device), twin(case)
    position = case.lengths[0] - 1
    for one in (call, exact):
        page = one.arguments["block_tables"][0, position // case.page_size]
        one.problem.kv_cache[page, position % case.page_size] = math.nan
    _judge(call.run(function), _answer_of(exact.problem))
