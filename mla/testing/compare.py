"""The judge: is this the right answer, and if not, what is wrong, where, and by how much."""

from __future__ import annotations

import math

import torch

from mla import checks
from mla.problem import Problem
from mla.reference import decode
from mla.testing.budget import Budget, budget


class Mismatch(AssertionError):
    """A result that is not the right answer.

    Attributes:
        kind: "type", "shape", "dtype", "device", "nan", "inf" or "error", in order of judgement.
        what: "out" or "lse".
        where: [request, token, head, dim] of the worst element (no dim for lse), or None.
    """

    def __init__(self, kind: str, what: str, text: str, where: tuple[int, ...] | None = None) -> None:
        super().__init__(text)
        self.kind, self.what, self.where = kind, what, where


def assert_close(
    actual: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    problem: Problem,
    *,
    exact: tuple[torch.Tensor, torch.Tensor] | None = None,
    allowed: Budget | None = None,
) -> None:
    """Judge a kernel's result for a problem; return nothing, or raise with the worst place.

    Order of judgement: kind, shape, dtype, device; then where NaN and infinities stand; then every element's error
    against its budget (see `mla.testing.budget`), which comes from the number formats and cannot be loosened.

    Args:
        actual: out [B, Q, H, R] (or [B, H, R] when Q is 1) in `problem.out_dtype`, or (out, lse) with lse float32
            [B * Q, H] or [B, Q, H] in `problem.lse_base`.
        problem: what was asked.
        exact: (out, lse) in float64 from `mla.reference.decode(problem, torch.float64)`, computed here if not given.
        allowed: the budget, computed here if not given.

    Raises:
        Mismatch: an AssertionError with `kind`, `what` and `where`.
    """
    out, lse = actual if isinstance(actual, tuple) else (actual, None)
    p = problem
    rows = (p.batch, p.q_len, p.num_heads)
    shapes: list[tuple[int, ...]] = [(*rows, p.kv_lora_rank)]
    if p.q_len == 1:
        shapes.append((p.batch, p.num_heads, p.kv_lora_rank))
    _check_kind("out", out, shapes, p.out_dtype, p.device)
    if lse is not None:
        _check_kind("lse", lse, [(p.batch * p.q_len, p.num_heads), rows], torch.float32, p.device)
    exact_out, exact_lse = decode(p, torch.float64) if exact is None else exact
    if allowed is None:
        allowed = budget(p, exact_out, exact_lse)
    _judge("out", out.reshape(exact_out.shape), exact_out, allowed.out, p.out_dtype)
    if lse is not None:
        _judge("lse", lse.reshape(rows), exact_lse, allowed.lse, torch.float32)


def _check_kind(
    what: str, value: object, shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> None:
    if not isinstance(value, torch.Tensor):
        raise Mismatch("type", what, f"{what} is a {type(value).__name__}; expected a torch.Tensor")
    if tuple(value.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise Mismatch("shape", what, f"{what} has shape {checks.shape(value)}; expected {expected}")
    if value.dtype is not dtype:
        raise Mismatch("dtype", what, f"{what} has dtype {checks.short(value.dtype)}; expected {checks.short(dtype)}")
    if value.device != device:
        raise Mismatch("device", what, f"{what} is on {value.device}; expected {device}")


def _judge(what: str, actual: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor, dtype: torch.dtype) -> None:
    got = actual.to(torch.float64)
    _judge_nan(what, got, exact)
    largest = torch.finfo(dtype).max
    overflows = exact.isinf() | (exact.abs() + allowed > largest)  # may round to infinity, and must if it is one
    misplaced = (got.isinf() & (~overflows | (got.sign() != exact.sign()))) | (exact.isinf() & (got != exact))
    if misplaced.any():
        raise _mismatch("inf", what, "infinities are misplaced", misplaced, misplaced.to(torch.float64), got, exact)
    judged = ~(exact.isnan() | exact.isinf() | got.isinf())
    error = torch.where(judged, (got - exact).abs(), 0.0)
    excess = torch.where(error > 0, error / allowed, 0.0)  # a budget of 0 (an empty row) allows nothing
    wrong = judged & ~(error <= allowed)  # a budget that is NaN allows nothing either
    if wrong.any():
        excess = torch.where(wrong, excess.nan_to_num(nan=0.0), -1.0)
        raise _mismatch("error", what, "errors exceed the budget", wrong, excess, got, exact, allowed)


def _judge_nan(what: str, got: torch.Tensor, exact: torch.Tensor) -> None:
    misplaced = got.isnan() != exact.isnan()
    if misplaced.any():
        raise _mismatch("nan", what, "NaN is misplaced", misplaced, misplaced.to(torch.float64), got, exact)


def _mismatch(
    kind: str,
    what: str,
    headline: str,
    wrong: torch.Tensor,
    badness: torch.Tensor,
    got: torch.Tensor,
    exact: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> Mismatch:
    where = tuple(int(i) for i in torch.unravel_index(badness.argmax(), badness.shape))
    place = ", ".join(
        f"{name} {index}" for name, index in zip(("request", "token", "head", "dim"), where, strict=False)
    )
    count, total = int(wrong.sum()), wrong.numel()
    lines = [
        f"{what}: {headline} in {count} of {total} elements ({count / total:.2%})",
        f"  worst at {place}: got {got[where].item():.9g}, expected {exact[where].item():.9g}",
    ]
    if allowed is not None:
        error = abs(got[where].item() - exact[where].item())
        lines.append(f"  error {error:.3g}, budget {allowed[where].item():.3g}")
    lines.append(
        f"  for information: signal to noise {signal_to_noise(got, exact):.1f} dB, cosine {cosine(got, exact):.6f}"
    )
    return Mismatch(kind, what, "\n".join(lines), where)


def _finite(got: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = got.isfinite() & exact.isfinite()
    return got[both].to(torch.float64), exact[both].to(torch.float64)


def signal_to_noise(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Signal to noise over the elements finite in both; information, not a judgement.

    Args:
        got: any floats.
        exact: the right ones, of the same shape.

    Returns:
        10 log10(sum exact^2 / sum (got - exact)^2) in decibels; inf when they are equal.
    """
    a, b = _finite(got, exact)
    noise, signal = float((a - b).square().sum()), float(b.square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def cosine(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Cosine similarity over the elements finite in both; information, not a judgement.

    Args:
        got: any floats.
        exact: the right ones, of the same shape.

    Returns:
        A number from -1 to 1; NaN when one of the two is zero.
    """
    a, b = _finite(got, exact)
    norm = float(a.norm() * b.norm())
    return float((a @ b) / norm) if norm > 0 else math.nan
