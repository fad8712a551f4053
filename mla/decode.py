"""The call."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from mla import dispatch, recall
from mla.backend import Backend
from mla.problem import Problem
from mla.strict import check_values, is_strict

Scale = float | torch.Tensor
Sinks = torch.Tensor | Sequence[torch.Tensor]


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: Sinks | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    *,
    return_lse: bool = False,
    lse: torch.Tensor | None = None,
    return_lse_base: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention of DeepSeek-style models over a paged cache of latents.

    For request b and query token t, with `n = max(seq_lens[b] - Q + t + 1, 0)` keys to see::

        dense:   slots = [block_tables[b, j // P] * P + j % P  for j in range(n)]
        sparse:  slots = [i for i in block_tables[b, t, :min(n, K)]  if 0 <= i < N * P]
        keys   = kv_cache[slots]                                   # [n, D]
        z      = bmm1_scale * query[b, t] @ keys.T                 # [H, n]
        out    = bmm2_scale * softmax(z) @ keys[:, :R]             # exp(sinks[h]) joins the softmax denominator
        lse    = log(sum(exp(z)) + exp(sinks[h]))                  # without bmm2_scale

    A row without a key is the identity of merging: out = 0, lse = -inf (the sink, when sinks are given). What a row may
    not see changes no bit of it, be it NaN.

    Letters: B requests, Q query tokens per request, H heads, N pages, P page size, W table width, R = 512, D = 576.

    Args:
        query: [B, Q, H, D], the absorbed query next to its rope part; bfloat16, float16 or float8_e4m3fn (the reference
            also float32 and float64). Last stride 1, other strides honoured.
        kv_cache: [N, P, D] or [N, 1, P, D], one latent per token, shared by all heads; the value is the first R numbers
            of the key. Same dtype as the query, or float8_e4m3fn with a bfloat16 or float16 query. Stored numbers are
            used as they are: scales are yours to put into bmm1_scale and bmm2_scale. Last stride 1, others honoured.
        workspace_buffer: scratch of any dtype, contiguous, used as bytes; None or too small is legal.
        qk_nope_head_dim: always 128.
        kv_lora_rank: R, always 512.
        qk_rope_head_dim: D - R, always 64.
        block_tables: int32 or int64. Dense: page ids, [B, W] with W >= ceil(length / P). Sparse: token slots
            (page * P + offset), [B, Q, K]; the first min(n, K) count, duplicates as often as they stand there, negative
            ones and those past the pool are skipped. A dense row that can see a page outside the pool, or more tokens
            than its table holds, is unspecified (the reference gives NaN); other rows are not touched by it.
        seq_lens: [B], int32 or int64: tokens in the cache per request, its Q new ones included. Never read on the host.
        max_seq_len: at least max(seq_lens); sizes things and means nothing. The reference needs no bound at all.
        sparse_mla_top_k: K, or 0 for dense.
        out: [B, Q, H, R] (or [B, H, R] when Q is 1), bfloat16, float16 or float32, last stride 1. Filled and returned,
            the very same object. None: a new bfloat16 tensor [B, Q, H, R], whatever the inputs' dtypes.
        bmm1_scale: multiplies the scores: q_scale * k_scale / sqrt(128 + 64), in natural units (models with YaRN have a
            further factor of theirs there). A float (rounded to float32), or a float32 tensor of 1 element on the
            query's device, which is read when the kernel runs.
        bmm2_scale: multiplies the output: v_scale * o_scale. Same forms.
        sinks: [H] float32 logits in natural-log units (other floats are cast), or a list that holds one such tensor.
            Added once per row to the softmax denominator, not multiplied by bmm1_scale.
        enable_pdl: programmatic dependent launch; None is where the GPU supports it. Never changes a bit of the result.
        backend: "auto", or a name from `mla.backends()`. A named backend runs or raises; it never falls back.
        return_lse: return (out, lse) instead of out.
        lse: float32 buffer [B * Q, H] or [B, Q, H], any strides. Filled whenever given; returned, the same object, with
            return_lse. None with return_lse: a new tensor [B * Q, H].
        return_lse_base: "base2" (also None) or "basee": the base of the logarithm, on every backend.
        deterministic: a row's bits do not depend on its batch mates, on B or on max_seq_len (slower: long rows are cut
            at fixed places, and scratch grows with max_seq_len). Without it they are the same from run to run, too.

    Returns:
        out, or (out, lse) with return_lse.

    Raises:
        ValueError: a shape, rank, size, stride, name or device is wrong. Nothing was launched or written then.
        TypeError: a dtype or kind is wrong. Nothing was launched or written then.
        BackendUnsupported: the backend refuses this legal problem (a ValueError; has `.reasons`).
        BackendBroken: the backend asked for by name cannot be loaded.

    Source:
        The signature and the argument meanings are those of FlashInfer's function of the same name; every point where
        its documentation is silent or its backends disagree is decided by the formulas above.

    Example:
        The mean of 3 keys that hold 1, and log2(3):

        >>> import torch
        >>> call = dict(query=torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16), workspace_buffer=None)
        >>> call |= dict(kv_cache=torch.ones(2, 64, 576, dtype=torch.bfloat16), block_tables=torch.tensor([[1]]))
        >>> call |= dict(seq_lens=torch.tensor([3]), max_seq_len=64, bmm1_scale=192**-0.5)
        >>> call |= dict(qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64)
        >>> out, lse = trtllm_batch_decode_with_kv_cache_mla(**call, return_lse=True)
        >>> tuple(out.shape), out.unique().tolist(), round(lse[0, 0].item(), 3)
        ((1, 1, 16, 512), [1.0], 1.585)
    """
    arguments = (
        query,
        kv_cache,
        workspace_buffer,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        sparse_mla_top_k,
        out,
        bmm1_scale,
        bmm2_scale,
        sinks,
        enable_pdl,
        backend,
        return_lse,
        lse,
        return_lse_base,
        deterministic,
    )
    kind = recall.kind_of(*arguments)
    seen = recall.find(kind)
    if seen is not None and not is_strict():
        done: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = seen.call(
            query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, out, bmm1_scale, bmm2_scale, sinks,
            return_lse, lse,
        )  # fmt: skip
        if done is not None:
            return done
    problem, chosen = _check_and_choose(*arguments, kind=kind)
    if is_strict():
        check_values(problem)
    out_view, lse_view = _outputs(problem)
    if not problem.is_empty:
        chosen.run(problem, out_view, lse_view)
        if kind is not None and dispatch.chosen_by_kind(problem, backend, chosen):
            recall.keep(kind, problem, out_view, lse_view, chosen)
    result = out_view if out is None else out
    if not return_lse:
        return result
    assert lse_view is not None
    return result, lse_view.view(problem.batch * problem.q_len, problem.num_heads) if lse is None else lse


def _outputs(problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Out as [B, Q, H, R] and the lse, if one is wanted, as [B, Q, H]: the caller's buffers, or new ones."""
    rows = (problem.batch, problem.q_len, problem.num_heads)
    out, lse = problem.out, problem.lse
    if out is None:
        out = torch.empty((*rows, problem.kv_lora_rank), dtype=problem.out_dtype, device=problem.device)
    if lse is None and problem.wants_lse:
        lse = torch.empty(rows, dtype=torch.float32, device=problem.device)
    return out, lse


def _check_and_choose(*arguments: Any, kind: Hashable = None) -> tuple[Problem, Backend]:
    """The checked problem and who runs it; all arguments of the call, in its order."""
    *head, backend, return_lse, lse, base, deterministic = arguments
    problem = Problem.from_call(
        *head, return_lse=return_lse, lse=lse, return_lse_base=base, deterministic=deterministic, kind=kind
    )
    return problem, dispatch.select(problem, backend)


def warmup(*args: Any, **kwargs: Any) -> str:
    """Compile and load whatever `trtllm_batch_decode_with_kv_cache_mla` needs for these very arguments; runs nothing.

    A kernel cannot be compiled while a stream is captured into a CUDA graph, so this comes before the capture. It is
    good for every later call of the same kind: with the same shapes, strides, dtypes and options, whatever the
    addresses, lengths, scales and max_seq_len are.

    Args:
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Returns:
        The name of the backend that the call will run.

    Raises:
        ValueError: as the call would, and so for every other error.

    Example:
        On a CPU there is nothing to compile:

        >>> import torch
        >>> call = dict(query=torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16), workspace_buffer=None)
        >>> call |= dict(kv_cache=torch.ones(2, 64, 576, dtype=torch.bfloat16), block_tables=torch.tensor([[1]]))
        >>> call |= dict(seq_lens=torch.tensor([3]), max_seq_len=64, bmm1_scale=192**-0.5)
        >>> call |= dict(qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64)
        >>> warmup(**call)
        'reference'
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = tuple(bound.arguments.values())
    problem, chosen = _check_and_choose(*arguments, kind=recall.kind_of(*arguments))
    prepare = getattr(chosen, "warmup", None)
    if prepare is not None and not problem.is_empty:
        prepare(problem, *_outputs(problem))
    return chosen.name


_SIGNATURE = inspect.signature(trtllm_batch_decode_with_kv_cache_mla)


def explain(*args: Any, **kwargs: Any) -> dispatch.Explanation:
    """Where `trtllm_batch_decode_with_kv_cache_mla` would run with these very arguments, and why; runs nothing.

    Args:
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Returns:
        An `Explanation`: the chosen backend, the order considered, and each known backend's verdict with its reasons.

    Raises:
        ValueError: as the call would for wrong arguments or an unknown backend. A backend that refuses or is broken is
            not an error here: it is the answer.
        TypeError: as the call would for a wrong dtype or kind.

    Example:
        >>> import torch
        >>> call = dict(query=torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16), workspace_buffer=None)
        >>> call |= dict(kv_cache=torch.ones(2, 64, 576, dtype=torch.bfloat16), block_tables=torch.tensor([[1]]))
        >>> call |= dict(seq_lens=torch.tensor([3]), max_seq_len=64, bmm1_scale=192**-0.5)
        >>> call |= dict(qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64)
        >>> why = explain(**call)
        >>> why.backend, why.order
        ('reference', ('reference',))
        >>> explain(**call, backend="trtllm-gen").reasons["trtllm-gen"]
        ('the tensors are on cpu; it runs on cuda', ...)
    """
    bound = _SIGNATURE.bind(*args, **kwargs).arguments
    backend = bound.pop("backend", "auto")
    return dispatch.explain_problem(Problem.from_call(**bound), backend)


warmup.__signature__ = _SIGNATURE.replace(return_annotation=str)  # type: ignore[attr-defined]
explain.__signature__ = _SIGNATURE.replace(return_annotation=dispatch.Explanation)  # type: ignore[attr-defined]
