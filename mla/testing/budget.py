"""How far an honest implementation may be from the exact answer, element by element, from the number formats alone.

An honest kernel may round the softmax weights to the cache's own format before they meet the values (bf16, fp16, e4m3
with or without a scale), keep partial results of split keys in 16 bits, work in the log2 domain, accumulate on tensor
cores, and round the output once. Each of these has a worst case, and the budget of an element is their sum. With
weights p_j (softmax, sink included), values v_j, exact result o, and A = sum_j p_j |v_j|:

    scores    2 dz (A + |o|)                dz: the error of one score, from accumulating D products
    weights   sum_j d_j (|v_j| + |o|)       d_j = max(u p_j, s p_max): relative rounding, absolute below the subnormals
    sums      (g_n + u_split) A             accumulation over n keys, one 16-bit rounding of partial results
    flushes   t sum_j (2 |v_j| + [v_j != 0])  t = 2^-126: a weight below the normal fp32 numbers (under a large sink,
                                            say), the factor that ends a row, and a product may become 0
    output    u_out |o|                     one rounding (plus the smallest step of the format, where o is not 0)

A score of minus infinity is exact, and so is its weight, 0: such a key takes no part in dz.

Nothing here is measured or tuned. Worst cases are meant: no honest implementation is ever refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla.checks import E4M3
from mla.problem import Problem
from mla.reference.literal import visible_slots
from mla.reference.precision import ieee_matmul

MMA_DEPTH = 16  # products that a tensor core sums at once before it rounds; fp8 instructions take 32
FP32_STEP = 2.0**-23  # of an fp32 accumulator that truncates (tensor cores do)
FP32_TINY = 2.0**-126  # the smallest normal fp32: what is less may be flushed to zero
FP8_STEP = 2.0**-13  # of sm_90's accumulator behind e4m3 products, which keeps 14 bits


@dataclass(frozen=True)
class WeightFormat:
    """The format that softmax weights may be rounded to: unit roundoff, and what a tiny weight may be off by."""

    unit: float
    step: float


WEIGHT_FORMATS = {
    torch.bfloat16: WeightFormat(2.0**-8, 2.0**-126),
    torch.float16: WeightFormat(2.0**-11, 2.0**-25),
    E4M3: WeightFormat(2.0**-4, 2.0**-10),
    torch.float32: WeightFormat(2.0**-24, 2.0**-126),
    torch.float64: WeightFormat(2.0**-24, 2.0**-126),  # the reference rounds float64 results to `out` only
}
"""By cache dtype: a kernel feeds the weights to the same tensor-core instruction as the values. The step is half the
smallest one of fp16 and e4m3; with wide exponents subnormals may be flushed to zero, as ex2.approx.ftz does."""

OUT_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
OUT_STEP = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25, torch.float32: 2.0**-126}  # may flush subnormals
SPLIT_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, E4M3: 2.0**-8}  # partials in 16 bits; else none


@dataclass(frozen=True)
class Budget:
    """Allowed absolute errors.

    Attributes:
        out: float64 [B, Q, H, R].
        lse: float64 [B, Q, H], in `problem.lse_base`.
    """

    out: torch.Tensor
    lse: torch.Tensor


@torch.no_grad()
def budget(problem: Problem, exact: torch.Tensor, exact_lse: torch.Tensor) -> Budget:
    """The budget of every element of a problem's result. Reads lengths and tables on the host.

    Args:
        problem: the problem.
        exact: float64 [B, Q, H, R], `mla.reference.decode(problem, torch.float64)`.
        exact_lse: float64 [B, Q, H], likewise.

    Returns:
        The largest absolute error that each element may have; 0 for a row without a key.
    """
    p = problem
    out, lse = torch.zeros_like(exact), torch.zeros_like(exact_lse)
    with ieee_matmul(p.device):
        for b in range(p.batch):
            for t in range(p.q_len):
                slots = visible_slots(p, b, t)
                if slots:
                    out[b, t], lse[b, t] = _row_budget(p, b, t, slots, exact[b, t], exact_lse[b, t])
    magnitude = exact.abs()
    step = torch.where(magnitude > 0, OUT_STEP[p.out_dtype], 0.0)
    out += OUT_UNIT[p.out_dtype] * magnitude + step
    lse += 2 * FP32_STEP * torch.where(exact_lse.isfinite(), exact_lse.abs(), 0.0)
    return Budget(out, lse)


def _row_budget(
    p: Problem, b: int, t: int, slots: list[int], exact: torch.Tensor, exact_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token, without the output's rounding: out [H, R] and lse [H]."""
    double = torch.float64
    index = torch.tensor(slots, device=p.device)
    keys = p.kv_cache[index // p.page_size, index % p.page_size].to(double)  # [n, D]
    query = p.query[b, t].to(double)  # [H, D]
    values = keys[:, : p.kv_lora_rank].abs()  # [n, R]
    bmm1 = abs(float(p.bmm1_scale))
    bmm2 = abs(float(p.bmm2_scale))
    scores = float(p.bmm1_scale) * (query @ keys.T)  # [H, n]
    natural = exact_lse * (0.6931471805599453 if p.lse_base == "base2" else 1.0)  # [H]
    weights = torch.exp(scores - natural[:, None])  # [H, n]

    never = scores.isneginf()  # [H, n]
    sizes = (query.abs() @ keys.abs().T).masked_fill(never, 0.0)  # [H, n]
    products = bmm1 * sizes.amax(dim=-1)  # [H], the largest sum of |q_d k_d|
    both_fp8 = p.query.dtype is E4M3 and p.kv_cache.dtype is E4M3
    per_score = (p.head_dim / 32) * FP8_STEP if both_fp8 else (p.head_dim / MMA_DEPTH + MMA_DEPTH) * FP32_STEP
    largest_score = scores.masked_fill(never, 0.0).abs().amax(dim=-1)  # [H]
    score_error = per_score * products + 4 * FP32_STEP * largest_score  # [H]; exp2's argument, too
    score_share = torch.expm1(2 * score_error)[:, None]  # [H, 1], relative error of a weight

    form = WEIGHT_FORMATS[p.kv_cache.dtype]
    largest = weights.amax(dim=-1, keepdim=True)  # [H, 1]
    rounding = torch.maximum(form.unit * weights, form.step * largest)  # [H, n]
    lost = rounding.sum(dim=-1, keepdim=True)  # [H, 1]
    mass = weights @ values  # [H, R], A before bmm2
    size = exact.abs() / bmm2 if bmm2 else torch.zeros_like(mass)
    n = len(slots)
    per_sum = (n / 32) * FP8_STEP if p.kv_cache.dtype is E4M3 else 0.0
    per_sum += (n / MMA_DEPTH + MMA_DEPTH) * FP32_STEP + SPLIT_UNIT.get(p.kv_cache.dtype, 0.0)
    out = score_share * (mass + size) + rounding @ values + lost * size + per_sum * mass
    # Weights and products are flushed before bmm2 multiplies, the factor that ends a row after it.
    flushed = (bmm2 + (bmm2 > 0)) * values.sum(dim=0) + bmm2 * (values > 0).sum(dim=0)  # [R]
    share = score_error + lost.squeeze(-1) + (n / MMA_DEPTH + MMA_DEPTH) * FP32_STEP
    return bmm2 * out + FP32_TINY * flushed, share / (0.6931471805599453 if p.lse_base == "base2" else 1.0)
