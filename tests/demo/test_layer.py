"""The layer's two forms are one: what is decoded from a paged cache of latents is attention over full keys."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

import mla
import mla.reference
from mla.demo.layer import DEEPSEEK_ROPE, AttentionLayer, Size, Weights
from mla.demo.paged import PagedCache
from mla.demo.rope import Rope

SIZE = Size(hidden=96, heads=5, q_lora_rank=48)
RAGGED = (37, 6, 64, 130)  # within a page, barely more than the new tokens, just full, over three pages
DIMS = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
ROPES = pytest.mark.parametrize(
    "rope",
    [Rope(), Rope(interleaved=False), Rope(factor=1.0), Rope(factor=1.0, interleaved=False)],
    ids=["yarn", "yarn-half-split", "plain-rope", "plain-rope-half-split"],
)


def make_layer(rope: Rope = DEEPSEEK_ROPE) -> AttentionLayer:
    """A small layer with float64 weights."""
    weights = Weights.seeded(SIZE, 0)
    return AttentionLayer(Weights(**{name: tensor.double() for name, tensor in vars(weights).items()}), rope)


def sequences(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """The hidden states of each request, [n, C] float64."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, SIZE.hidden, dtype=torch.float64, generator=generator) for n in lengths]


def last_tokens(hidden: list[torch.Tensor], q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last Q tokens of each request, [B, Q, C], and their positions, [B, Q]."""
    positions = torch.tensor([[len(x) - q_len + t for t in range(q_len)] for x in hidden])
    return torch.stack([x[len(x) - q_len :] for x in hidden]), positions


def cache_of(layer: AttentionLayer, hidden: list[torch.Tensor], dtype: torch.dtype, q_len: int) -> PagedCache:
    """All tokens but the last Q of each request are written at once, right-aligned; then the last Q are appended."""
    cache = PagedCache([len(x) for x in hidden], dtype, page_size=64, seed=3)
    older = [layer.latents(x[None, :-q_len], torch.arange(len(x) - q_len)[None])[0] for x in hidden]
    longest = max(len(rows) for rows in older)
    aligned = torch.stack([torch.nn.functional.pad(rows, (0, 0, longest - len(rows), 0)) for rows in older])
    cache.append(aligned, [len(rows) for rows in older])
    cache.append(layer.latents(*last_tokens(hidden, q_len)))
    return cache


def exact_decode(layer: AttentionLayer, cache: PagedCache, query: torch.Tensor) -> torch.Tensor:
    """The layer's output through the float64 reference. The scale goes into the query: the call takes it in float32."""
    problem = mla.Problem.from_call(
        query * layer.softmax_scale, cache.pages, None, *DIMS.values(), cache.tables, cache.lengths, cache.longest
    )
    out, _ = mla.reference.decode(problem, torch.float64)
    return layer.project_out(out)


def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest ||y - exact|| / ||exact|| of a token."""
    return float(((y - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


@ROPES
@pytest.mark.parametrize("q_len", [1, 2, 3])
def test_the_absorbed_decode_equals_attention_over_full_keys(rope: Rope, q_len: int) -> None:
    """Float64 throughout: what is left is the rounding of sums of some hundred numbers, far below 1e-10."""
    layer, hidden = make_layer(rope), sequences(RAGGED)
    cache = cache_of(layer, hidden, torch.float64, q_len)
    decoded = exact_decode(layer, cache, layer.absorbed_query(*last_tokens(hidden, q_len)))
    exact = torch.stack([layer.plain_attention(x)[-q_len:] for x in hidden])
    assert relative(decoded, exact) < 1e-10


@pytest.mark.parametrize("q_len", [1, 2, 3])
def test_the_public_call_loses_no_more_than_the_rounding_of_its_output_and_scale(q_len: int) -> None:
    """Float64 inputs. `out` in float32 is off by a relative 2**-24, and so is bmm1_scale: scores by |z| * 2**-24."""
    layer, hidden = make_layer(), sequences(RAGGED)
    cache = cache_of(layer, hidden, torch.float64, q_len)
    query = layer.absorbed_query(*last_tokens(hidden, q_len))
    decoded = mla.trtllm_batch_decode_with_kv_cache_mla(
        query=query,
        kv_cache=cache.pages,
        workspace_buffer=None,
        **DIMS,
        block_tables=cache.tables,
        seq_lens=cache.lengths,
        max_seq_len=cache.longest,
        out=torch.empty(len(RAGGED), q_len, SIZE.heads, 512, dtype=torch.float32),
        bmm1_scale=layer.softmax_scale,
    )
    assert isinstance(decoded, torch.Tensor)
    exact = torch.stack([layer.plain_attention(x)[-q_len:] for x in hidden])
    scores = layer.softmax_scale * torch.einsum("bqhd,npd->bqhnp", query, cache.pages.nan_to_num(0.0))
    assert relative(layer.project_out(decoded), exact) < (1 + float(scores.abs().max())) * 2**-24


def test_decoding_token_by_token_and_three_at_once_are_the_same() -> None:
    layer, hidden = make_layer(), sequences((50, 21))
    together_cache = cache_of(layer, hidden, torch.float64, 3)
    together = exact_decode(layer, together_cache, layer.absorbed_query(*last_tokens(hidden, 3)))
    for t in range(3):
        until = [x[: len(x) - 2 + t] for x in hidden]
        cache = cache_of(layer, until, torch.float64, 1)
        alone = exact_decode(layer, cache, layer.absorbed_query(*last_tokens(until, 1)))
        assert relative(alone[:, 0], together[:, t]) < 1e-12


def test_a_later_token_changes_nothing_for_an_earlier_one() -> None:
    layer, (hidden,) = make_layer(), sequences((40,))
    changed = hidden.clone()
    changed[25:] += 1.0
    before, after = layer.plain_attention(hidden), layer.plain_attention(changed)
    assert relative(after[:25], before[:25]) < 1e-13
    assert relative(after[25:], before[25:]) > 1e-3


def test_asking_for_the_last_tokens_only_gives_the_same_tokens() -> None:
    layer, (hidden,) = make_layer(), sequences((40,))
    assert relative(layer.plain_attention(hidden, first=33), layer.plain_attention(hidden)[33:]) < 1e-13


@ROPES
def test_scores_depend_on_distance_and_not_on_position(rope: Rope) -> None:
    layer, (hidden,) = make_layer(rope), sequences((30,))
    positions = torch.arange(30)[None]

    def scores(offset: int) -> torch.Tensor:
        query = layer.absorbed_query(hidden[None], positions + offset)[0]  # [Q, H, D]
        return torch.einsum("qhd,td->hqt", query, layer.latents(hidden[None], positions + offset)[0])

    torch.testing.assert_close(scores(0), scores(1000), rtol=0, atol=1e-9)


def test_the_position_matters() -> None:
    """So that the test before this one does not hold for want of a rotation."""
    layer, (hidden,) = make_layer(), sequences((30,))
    reversed_order = layer.plain_attention(torch.cat([hidden[:-1].flip(0), hidden[-1:]]))[-1]
    assert relative(reversed_order, layer.plain_attention(hidden)[-1]) > 1e-2


def test_yarn_keeps_the_fast_pairs_and_slows_the_slow_ones_by_its_factor() -> None:
    plain, stretched = Rope(factor=1.0).frequencies(), Rope().frequencies()
    turns = plain * 4096 / (2 * torch.pi)
    ratio = plain / stretched
    torch.testing.assert_close(ratio[turns > 40], torch.ones_like(ratio[turns > 40]))
    torch.testing.assert_close(ratio[turns < 0.7], torch.full_like(ratio[turns < 0.7], 40.0))
    assert (ratio.diff() >= 0).all()
    assert Rope(factor=1.0).score_factor == 1.0


def test_float32_weights_compute_in_float64_what_float64_weights_do() -> None:
    """The cast piece by piece loses and repeats nothing, also when the pieces do not divide the rows."""
    weights = Weights.seeded(Size(hidden=1500, heads=17, q_lora_rank=20), 0)
    wide = Weights(**{name: tensor.double() for name, tensor in vars(weights).items()})
    hidden = torch.randn(9, 1500, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    narrow = AttentionLayer(weights).plain_attention(hidden)
    assert narrow.dtype is torch.float64
    assert relative(narrow, AttentionLayer(wide).plain_attention(hidden)) < 1e-13


@pytest.mark.parametrize("name", [field.name for field in fields(Weights)])
def test_every_weight_matters(name: str) -> None:
    layer, (hidden,) = make_layer(), sequences((20,))
    other = replace(layer.weights, **{name: getattr(layer.weights, name).flip(0)})
    assert relative(AttentionLayer(other).plain_attention(hidden), layer.plain_attention(hidden)) > 1e-3


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (Weights.seeded(SIZE, seed) for seed in (0, 0, 1))
    for name, tensor in vars(first).items():
        assert torch.equal(tensor, getattr(again, name))
        assert not torch.equal(tensor, getattr(other, name))


def test_unwritten_slots_of_the_paged_cache_are_nan_and_pages_belong_to_one_request() -> None:
    cache = PagedCache([130, 5, 64], torch.bfloat16, page_size=64)
    assert cache.pages.isnan().all()
    used = cache.tables[cache.tables >= 0].tolist()
    assert len(used) == len(set(used)) == 3 + 1 + 1
    assert used != sorted(used)
