"""Merging partial results: the algebra of (out, lse) pairs over disjoint sets of keys.

A state is the attention over some keys: out [..., H, R] and its log-sum-exp [..., H]. Merging is associative and
commutative, and (0, -inf) is its identity. A sink is a state too: out = 0, lse = the sink. So give sinks to one part
only, or merge them in as their own state; never to every part.
"""

from __future__ import annotations

import math

import torch

from mla import checks


@torch.no_grad()
def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    lse_base: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial attentions over disjoint keys, elementwise over rows.

    Args:
        out_a: [..., H, R], any floats.
        lse_a: float32 or float64, [..., H], or [rows, H] with the leading axes of `out_a` flattened (what the call
            returns).
        out_b: shape, dtype and device of `out_a`.
        lse_b: shape, dtype and device of `lse_a`.
        lse_base: the base of both lse and of the result, "base2" (also None) or "basee".

    Returns:
        (out, lse) of the union, in the dtypes and shapes of `out_a` and `lse_a`. Computed in float32 or wider. A state
        with lse = -inf adds nothing, whatever its `out` holds; merging only such states gives (0, -inf).

    Raises:
        ValueError: shapes or devices differ, or the base is unknown.
        TypeError: a dtype or kind is wrong.

    Example:
        The value 0 seen with total weight 2, and the value 10 with total weight 8:

        >>> import torch
        >>> a, b = torch.zeros(1, 1, 512), torch.full((1, 1, 512), 10.0)
        >>> out, lse = merge_state(a, torch.tensor([[1.0]]), b, torch.tensor([[3.0]]))  # lse in base 2
        >>> out[0, 0, 0].item(), round(2 ** lse.item())
        (8.0, 10)
    """
    for name, value in {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}.items():
        checks.tensor(name, value, "part of a state")
    for name, value, twin, first in (("out_b", out_b, "out_a", out_a), ("lse_b", lse_b, "lse_a", lse_a)):
        if value.shape != first.shape:
            raise ValueError(f"{name} has shape {checks.shape(value)}; expected {checks.shape(first)}, that of {twin}")
        if value.dtype is not first.dtype:
            raise TypeError(
                f"{name} has dtype {checks.short(value.dtype)}; expected {checks.short(first.dtype)}, that of {twin}"
            )
    rows = _check_state("out_a", out_a, "lse_a", lse_a)
    checks.same_device(out_a.device, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    outs = torch.stack([out_a, out_b], dim=-3)  # [..., 2, H, R]
    lses = torch.stack([lse_a.reshape(rows), lse_b.reshape(rows)], dim=-2)  # [..., 2, H]
    out, lse = _merge(outs, lses, lse_base)
    return out, lse.reshape(lse_a.shape)


@torch.no_grad()
def merge_states(
    outs: torch.Tensor, lses: torch.Tensor, *, lse_base: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge S partial attentions over disjoint keys at once.

    Args:
        outs: [..., S, H, R], any floats.
        lses: [..., S, H], float32 or float64.
        lse_base: the base of the lse given and returned, "base2" (also None) or "basee".

    Returns:
        (out [..., H, R], lse [..., H]) of the union; S = 0 gives the identity. Otherwise as `merge_state`.

    Raises:
        ValueError: shapes or devices do not fit, or the base is unknown.
        TypeError: a dtype or kind is wrong.
    """
    checks.tensor("outs", outs, "[..., S, H, R]")
    checks.tensor("lses", lses, "[..., S, H]")
    if outs.ndim < 3:
        raise ValueError(f"outs has shape {checks.shape(outs)}, {outs.ndim} dimensions; expected [..., S, H, R]")
    if lses.shape != outs.shape[:-1]:
        raise ValueError(
            f"lses has shape {checks.shape(lses)}; expected {list(outs.shape[:-1])}, that of outs without R"
        )
    _check_state("outs", outs, "lses", lses)
    checks.same_device(outs.device, lses=lses)
    return _merge(outs, lses, lse_base)


def _check_state(out_name: str, out: torch.Tensor, lse_name: str, lse: torch.Tensor) -> torch.Size:
    """Check one (out, lse) pair; return the shape of the lse with `out`'s leading axes."""
    if not out.is_floating_point():
        raise TypeError(f"{out_name} has dtype {checks.short(out.dtype)}; expected a float")
    if lse.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{lse_name} has dtype {checks.short(lse.dtype)}; expected float32 or float64")
    if out.ndim < 2:
        raise ValueError(f"{out_name} has shape {checks.shape(out)}, {out.ndim} dimensions; expected [..., H, R]")
    rows = out.shape[:-1]
    flat = (math.prod(rows[:-1]), rows[-1])
    if lse.shape not in (rows, flat):
        raise ValueError(
            f"{lse_name} has shape {checks.shape(lse)}; expected {list(rows)} or {list(flat)}, for {out_name} of shape "
            f"{checks.shape(out)}"
        )
    return rows


def _merge(outs: torch.Tensor, lses: torch.Tensor, lse_base: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """outs [..., S, H, R], lses [..., S, H] -> out [..., H, R], lse [..., H]."""
    power, log = (
        (torch.exp2, torch.log2) if checks.lse_base("lse_base", lse_base) == "base2" else (torch.exp, torch.log)
    )
    if outs.shape[-3] == 0:
        return outs.new_zeros(outs.shape[:-3] + outs.shape[-2:]), lses.new_full(
            lses.shape[:-2] + lses.shape[-1:], -math.inf
        )
    wide = torch.promote_types(lses.dtype, torch.float64 if outs.dtype is torch.float64 else torch.float32)
    scores = lses.to(wide)
    empty = scores == -math.inf
    largest = scores.amax(dim=-2, keepdim=True)  # [..., 1, H]
    shift = torch.where(largest == -math.inf, 0.0, largest)
    weights = power(scores - shift)  # [..., S, H]
    total = weights.sum(dim=-2)  # [..., H]
    values = torch.where(empty[..., None], 0.0, outs.to(wide))  # an empty state may hold anything, NaN too
    out = (weights[..., None] * values).sum(dim=-3) / torch.where(total == 0, 1.0, total)[..., None]
    return out.to(outs.dtype), (largest.squeeze(-2) + log(total)).to(lses.dtype)
