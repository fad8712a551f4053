"""Decoding a known sequence through the call: prefill, then Q tokens at a time, each step timed."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import mla
from mla.demo.layer import NOPE, ROPE, AttentionLayer, R
from mla.demo.paged import PagedCache
from mla.demo.storage import E4M3, Formats
from mla.progress import Advance


@dataclass(frozen=True)
class Decoded:
    """What one configuration gave.

    Attributes:
        formats: of the query and the cache.
        output: [S, C], the layer's output for the decoded tokens.
        explanation: where the call runs, and why.
        cache_scale: what latents were divided by before they were stored.
        bytes_per_token: of the cache.
        milliseconds: of each part of a step ("projections", "storing", "attention call"), the median over the steps.
    """

    formats: Formats
    output: torch.Tensor
    explanation: mla.Explanation
    cache_scale: float
    bytes_per_token: int
    milliseconds: dict[str, float]


def decode(
    layer: AttentionLayer, hidden: torch.Tensor, prefill: int, q_len: int, formats: Formats, advance: Advance
) -> Decoded:
    """Put the first `prefill` tokens of one request into a paged cache and decode the others, `q_len` at a time.

    The hidden states are given, so no step's output is the next step's input: errors do not pile up, and each token can
    be compared.

    Args:
        layer: the layer.
        hidden: [T, C]; T - prefill is a positive multiple of q_len.
        prefill: tokens that are there before the first step.
        q_len: Q.
        formats: an e4m3 cache has one scale, from the prefill's largest magnitude; an e4m3 query has its own per step.
        advance: called before each step.
    """
    device, total = hidden.device, hidden.shape[0]
    positions = torch.arange(total, device=device)[None]  # [1, T]
    hidden = hidden[None]  # [1, T, C]
    first_latents = layer.latents(hidden[:, :prefill], positions[:, :prefill])  # [1, prefill, D]
    scale = mla.quantize_e4m3(first_latents)[1] if formats.cache is E4M3 else None
    cache = PagedCache([total], formats.cache, device=device, scale=scale)
    cache.append(first_latents)
    k_scale: float | torch.Tensor = 1.0 if scale is None else scale  # and v_scale: one latent is both
    workspace = torch.zeros(8 << 20, dtype=torch.uint8, device=device)
    clock = _Clock(device)
    outputs = []
    for start in range(prefill, total, q_len):
        advance(f"decoding: {formats.name}")
        new, at = hidden[:, start : start + q_len], positions[:, start : start + q_len]
        with clock.measure("projections"):
            latents = layer.latents(new, at)  # [1, Q, D]
            query = layer.absorbed_query(new, at)  # [1, Q, H, D]
        with clock.measure("storing"):
            cache.append(latents)
            query, q_scale = _store_query(query, formats)
        call: dict[str, Any] = {
            "query": query,
            "kv_cache": cache.pages,
            "workspace_buffer": workspace,
            "qk_nope_head_dim": NOPE,
            "kv_lora_rank": R,
            "qk_rope_head_dim": ROPE,
            "block_tables": cache.tables,
            "seq_lens": cache.lengths,
            "max_seq_len": total,
            "bmm1_scale": q_scale * k_scale * layer.softmax_scale,
            "bmm2_scale": k_scale,
            "backend": "auto",
        }
        with clock.measure("attention call"):
            attention = mla.trtllm_batch_decode_with_kv_cache_mla(**call)
        assert isinstance(attention, torch.Tensor)  # [1, Q, H, R] bf16; a tuple only with return_lse
        with clock.measure("projections"):
            outputs.append(layer.project_out(attention)[0])  # [Q, C]
        clock.end_step()
    return Decoded(
        formats=formats,
        output=torch.cat(outputs),
        explanation=mla.explain(**call),
        cache_scale=float(k_scale),
        bytes_per_token=cache.bytes_per_token,
        milliseconds=clock.medians(),
    )


def _store_query(query: torch.Tensor, formats: Formats) -> tuple[torch.Tensor, float | torch.Tensor]:
    """The query in its format, and its scale."""
    return mla.quantize_e4m3(query) if formats.query is E4M3 else (query.to(formats.query), 1.0)


class _Clock:
    """Milliseconds of each part of a step, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[dict[str, float]] = [defaultdict(float)]

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        self._wait()
        begin = time.perf_counter()
        yield
        self._wait()
        self._steps[-1][part] += 1e3 * (time.perf_counter() - begin)

    def end_step(self) -> None:
        self._steps.append(defaultdict(float))

    def medians(self) -> dict[str, float]:
        steps = self._steps[:-1]
        return {part: statistics.median(step[part] for step in steps) for part in steps[0]}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
