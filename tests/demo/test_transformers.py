"""An independent check: the attention layer of transformers, run by its own code, against the paged absorbed decode.

transformers never absorbs anything here. It builds keys and values of every head for the whole sequence and masks. Our
side gets the same weights, keeps only latents in shuffled pages, and decodes the last Q tokens of a ragged batch.

**Tolerances.** With a float64 module transformers still computes some things in float32: both RMS norms, the softmax,
and cos and sin of position * frequency. Each of those rounds by a relative 2**-24. The rotation is the worst: an angle
at position T is off by up to T * 2**-24, and so is a rotated number. Errors of the layer's output are therefore judged
against T * 2**-24, T the longest length. In a float32 module every product is rounded as well, in sums of up to 512
numbers: at most 512 * 2**-24, relative to the sum of magnitudes.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is ever asked for

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import mla
from mla.demo.layer import AttentionLayer, Weights
from mla.demo.paged import PagedCache
from mla.demo.rope import Rope

HIDDEN = 256
LENGTHS = (70, 3, 64, 129)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SETTINGS = pytest.mark.parametrize(
    ("rope_parameters", "interleaved"),
    [(PLAIN, True), (PLAIN, False), (YARN, True), (YARN, False)],
    ids=["interleaved", "half-split", "yarn-interleaved", "yarn-half-split"],
)


class Theirs:
    """transformers' layer and its rotary embedding, seeded, in one dtype."""

    def __init__(self, rope_parameters: dict[str, Any], interleaved: bool, dtype: torch.dtype) -> None:
        config = DeepseekV3Config(
            hidden_size=HIDDEN,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=64,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            max_position_embeddings=163840 if rope_parameters is YARN else 4096,
            rope_parameters=dict(rope_parameters),
            rope_interleave=interleaved,
            attn_implementation="eager",
        )
        generator = torch.Generator().manual_seed(0)
        self.layer = DeepseekV3Attention(config, layer_idx=0).to(dtype).eval()
        self.rotary = DeepseekV3RotaryEmbedding(config)
        for name, parameter in self.layer.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            spread = 1.0 + 0.2 * values if "norm" in name else values * parameter.shape[-1] ** -0.5
            parameter.data.copy_(spread)

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Full causal attention over one request, [T, C] -> [T, C]."""
        n = hidden.shape[0]
        mask = torch.full((n, n), -torch.inf, dtype=hidden.dtype).triu(1)[None, None]
        embeddings = self.rotary(hidden[None], torch.arange(n)[None])
        return self.layer(hidden[None], position_embeddings=embeddings, attention_mask=mask)[0][0]


def ours_from(theirs: Theirs, rope: Rope) -> AttentionLayer:
    """Our layer with the weights of transformers' module."""
    held = {name: parameter.detach() for name, parameter in theirs.layer.named_parameters()}
    weights = Weights(
        q_a=held.pop("q_a_proj.weight"),
        q_a_norm=held.pop("q_a_layernorm.weight"),
        q_b=held.pop("q_b_proj.weight"),
        kv_a=held.pop("kv_a_proj_with_mqa.weight"),
        kv_a_norm=held.pop("kv_a_layernorm.weight"),
        kv_b=held.pop("kv_b_proj.weight"),
        o=held.pop("o_proj.weight"),
    )
    assert not held, f"weights that our layer does not know: {list(held)}"
    return AttentionLayer(weights, rope)


def requests(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for n in LENGTHS]


def paged_decode(layer: AttentionLayer, hidden: list[torch.Tensor], q_len: int) -> torch.Tensor:
    """The last Q tokens of each request through the cache and the public call, [B, Q, C]."""
    longest, dtype = max(LENGTHS), hidden[0].dtype
    cache = PagedCache(LENGTHS, dtype, page_size=16, seed=5)
    latents = [layer.latents(x[None], torch.arange(len(x))[None])[0] for x in hidden]
    aligned = torch.stack([torch.nn.functional.pad(rows, (0, 0, longest - len(rows), 0)) for rows in latents])
    cache.append(aligned, LENGTHS)
    new = torch.stack([x[len(x) - q_len :] for x in hidden])
    positions = torch.tensor([[n - q_len + t for t in range(q_len)] for n in LENGTHS])
    attention = mla.trtllm_batch_decode_with_kv_cache_mla(
        query=layer.absorbed_query(new, positions),
        kv_cache=cache.pages,
        workspace_buffer=None,
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=cache.tables,
        seq_lens=cache.lengths,
        max_seq_len=longest,
        out=torch.empty(len(LENGTHS), q_len, layer.heads, 512, dtype=torch.float32),
        bmm1_scale=layer.softmax_scale,
        backend="reference",
    )
    assert isinstance(attention, torch.Tensor)
    return layer.project_out(attention)


def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest ||y - exact|| / ||exact|| of a token."""
    return float(((y.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1)).max())


def rope_of(rope_parameters: dict[str, Any], interleaved: bool) -> Rope:
    return Rope(interleaved=interleaved, factor=rope_parameters.get("factor", 1.0))


@SETTINGS
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, max(LENGTHS) * 2.0**-24), (torch.float32, 512 * 2.0**-24)],
    ids=["float64", "float32"],
)
def test_the_paged_absorbed_decode_is_the_attention_layer_of_transformers(
    rope_parameters: dict[str, Any], interleaved: bool, q_len: int, dtype: torch.dtype, tolerance: float
) -> None:
    theirs = Theirs(rope_parameters, interleaved, dtype)
    ours = ours_from(theirs, rope_of(rope_parameters, interleaved))
    hidden = requests(dtype)
    expected = torch.stack([theirs(x)[-q_len:] for x in hidden])
    assert relative(paged_decode(ours, hidden, q_len), expected) < tolerance


@SETTINGS
def test_our_plain_attention_is_theirs_at_every_token(rope_parameters: dict[str, Any], interleaved: bool) -> None:
    theirs = Theirs(rope_parameters, interleaved, torch.float64)
    ours = ours_from(theirs, rope_of(rope_parameters, interleaved))
    for x in requests(torch.float64):
        assert relative(ours.plain_attention(x), theirs(x)) < max(LENGTHS) * 2.0**-24


@pytest.mark.parametrize(("rope_parameters", "factor"), [(PLAIN, 1.0), (YARN, 40.0)], ids=["plain", "yarn"])
def test_frequencies_and_softmax_scale_are_theirs(rope_parameters: dict[str, Any], factor: float) -> None:
    """Their frequencies are float32 throughout: a few roundings of 2**-24, on powers of theta."""
    theirs = Theirs(rope_parameters, True, torch.float64)
    rope = Rope(factor=factor)
    torch.testing.assert_close(theirs.rotary.inv_freq.double(), rope.frequencies(), rtol=1e-6, atol=0)
    assert theirs.rotary.attention_scaling == 1.0
    assert ours_from(theirs, rope).softmax_scale == pytest.approx(theirs.layer.scaling, rel=1e-12)


def test_the_wrong_pairing_of_rotated_numbers_is_seen() -> None:
    """So that agreement above means something: the other pairing differs by much more than the tolerance."""
    theirs = Theirs(PLAIN, True, torch.float64)
    wrong = ours_from(theirs, Rope(interleaved=False, factor=1.0))
    (hidden, *_) = requests(torch.float64)
    assert relative(wrong.plain_attention(hidden), theirs(hidden)) > 1e-2
