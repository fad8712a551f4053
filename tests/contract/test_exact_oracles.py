"""Inputs whose exact answer is known by hand: uniform weights, sinks, and one-hot temperatures."""

from __future__ import annotations

import math

import pytest
import torch

NO_QUERY = (576,)


def zeros(batch: int, q_len: int, heads: int) -> torch.Tensor:
    return torch.zeros(batch, q_len, heads, 576, dtype=torch.bfloat16)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 64])
@pytest.mark.parametrize(("length", "q_len"), [(13, 4), (12, 4), (16, 3), (64, 2), (1, 1), (40, 9)])
def test_row_i_sees_keys_up_to_length_minus_q_plus_i(decode, paged, constant, page_size, length, q_len):
    cache, tables, lengths = paged([constant(*range(length))], page_size)
    out, lse = decode(zeros(1, q_len, 3), cache, tables, lengths, return_lse=True, return_lse_base="basee")
    for i in range(q_len):
        n = length - q_len + 1 + i
        assert torch.equal(out[0, i], torch.full((3, 512), (n - 1) / 2).bfloat16())
        assert lse[i].tolist() == pytest.approx([math.log(n)] * 3, abs=1e-6)


def test_thirteen_keys_and_four_tokens_give_four_and_a_half_five_five_and_a_half_six(decode, paged, constant):
    cache, tables, lengths = paged([constant(*range(13))], 4)
    out = decode(zeros(1, 4, 1), cache, tables, lengths)
    assert out[0, :, 0, 0].tolist() == [4.5, 5.0, 5.5, 6.0]


def test_rows_without_a_key_are_the_identity_and_later_rows_are_normal(decode, paged, constant):
    cache, tables, lengths = paged([constant(0, 1)], 4)
    out, lse = decode(zeros(1, 4, 2), cache, tables, lengths, return_lse=True, return_lse_base="basee")
    assert out[0, :, 0, 0].tolist() == [0.0, 0.0, 0.0, 0.5]
    assert lse[:, 0].tolist() == [-math.inf, -math.inf, 0.0, pytest.approx(math.log(2))]
    assert torch.equal(out[0, :2], torch.zeros(2, 2, 512).bfloat16())


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 255, 257])
def test_ones_stay_ones_at_every_length(decode, paged, length):
    cache, tables, lengths = paged([torch.ones(length, 576).bfloat16()], 64)
    assert torch.equal(decode(zeros(1, 1, 2), cache, tables, lengths), torch.ones(1, 1, 2, 512).bfloat16())


def test_every_row_belongs_to_its_own_request(decode, paged, constant):
    cache, tables, lengths = paged([constant(*[b + 1] * n) for b, n in enumerate((5, 70, 2))], 8)
    out = decode(zeros(3, 3, 8), cache, tables, lengths)
    expected = torch.tensor([1.0, 2.0, 3.0]).bfloat16()[:, None, None, None].expand(3, 3, 8, 512).clone()
    expected[2, 0] = 0.0  # length 2, Q = 3: the first token sees nothing
    assert torch.equal(out, expected)


@pytest.mark.parametrize("q_len", [1, 3])
def test_a_sink_adds_its_exponential_to_the_denominator(decode, paged, q_len):
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.5])
    cache, tables, lengths = paged([torch.ones(9, 576).bfloat16(), torch.ones(4, 576).bfloat16()], 4)
    out, lse = decode(
        zeros(2, q_len, 4), cache, tables, lengths, sinks=sinks, bmm1_scale=7.0,
        out=torch.empty(2, q_len, 4, 512, dtype=torch.float32), return_lse=True, return_lse_base="basee",
    )  # fmt: skip
    for b, length in enumerate((9, 4)):
        for t in range(q_len):
            n = length - q_len + t + 1
            for h, sink in enumerate(sinks.tolist()):
                assert out[b, t, h].tolist() == pytest.approx([n / (n + math.exp(sink))] * 512, rel=1e-6)
                assert lse[b * q_len + t, h].item() == pytest.approx(math.log(n + math.exp(sink)), rel=1e-6)


def test_a_sink_scales_the_output_by_a_sigmoid_of_lse_minus_sink(decode, paged):
    torch.manual_seed(0)
    query, sinks = torch.randn(2, 2, 6, 576).bfloat16(), torch.randn(6)
    cache, tables, lengths = paged([torch.randn(n, 576).bfloat16() for n in (20, 7)], 4)
    wide = {"out": None, "bmm1_scale": 0.05, "return_lse": True, "return_lse_base": "basee"}
    plain, lse = decode(query, cache, tables, lengths, **wide | {"out": torch.empty(2, 2, 6, 512)})
    sunk, _ = decode(query, cache, tables, lengths, sinks=sinks, **wide | {"out": torch.empty(2, 2, 6, 512)})
    expected = plain * torch.sigmoid(lse - sinks).view(2, 2, 6, 1)
    torch.testing.assert_close(sunk, expected, rtol=1e-5, atol=1e-6)


def test_a_sink_of_minus_infinity_is_no_sink(decode, paged):
    query = torch.randn(1, 2, 3, 576).bfloat16()
    cache, tables, lengths = paged([torch.randn(1, 576).bfloat16()], 4)
    none = decode(query, cache, tables, lengths, return_lse=True)
    off = decode(query, cache, tables, lengths, return_lse=True, sinks=torch.full((3,), -math.inf))
    assert torch.equal(none[0], off[0])
    assert torch.equal(none[1], off[1])


def test_an_empty_row_with_a_sink_has_the_sink_as_its_lse(decode, paged, constant):
    cache, tables, _ = paged([constant(1)], 4)
    sinks = torch.tensor([0.5, -3.0])
    for base, unit in (("basee", 1.0), ("base2", math.log(2.0))):
        out, lse = decode(
            zeros(1, 1, 2),
            cache,
            tables,
            torch.zeros(1, dtype=torch.int32),
            sinks=sinks,
            return_lse=True,
            return_lse_base=base,
        )
        assert torch.equal(out, torch.zeros(1, 1, 2, 512).bfloat16())
        assert lse[0].tolist() == pytest.approx([0.5 / unit, -3.0 / unit], rel=1e-6)


@pytest.mark.parametrize(("bmm1", "bmm2"), [(0.25, 1.0), (0.05, 0.5), (0.1352, 3.0), (1.0, 1.0)])
def test_bmm1_is_a_temperature_and_bmm2_a_factor(decode, paged, bmm1, bmm2):
    latents = torch.zeros(6, 576)
    latents[:, 0] = torch.arange(6)
    query = zeros(1, 1, 2)
    query[..., 0] = 1.0
    cache, tables, lengths = paged([latents.bfloat16()], 4)
    out, lse = decode(
        query, cache, tables, lengths, bmm1_scale=bmm1, bmm2_scale=bmm2, out=torch.empty(1, 1, 2, 512),
        return_lse=True, return_lse_base="basee",
    )  # fmt: skip
    weights = [math.exp(bmm1 * j) for j in range(6)]
    assert out[0, 0, 0, 0].item() == pytest.approx(
        bmm2 * sum(j * w for j, w in enumerate(weights)) / sum(weights), rel=1e-6
    )
    assert lse[0, 0].item() == pytest.approx(math.log(sum(weights)), rel=1e-6)
    assert out[..., 1:].abs().max() == 0


def test_eight_equal_keys_have_an_lse_of_three_bits(decode, paged):
    cache, tables, lengths = paged([torch.ones(8, 576).bfloat16()], 4)
    for base in (None, "base2"):
        assert decode(zeros(1, 1, 1), cache, tables, lengths, return_lse=True, return_lse_base=base)[1].item() == 3.0
    natural = decode(zeros(1, 1, 1), cache, tables, lengths, return_lse=True, return_lse_base="basee")[1].item()
    assert natural == pytest.approx(math.log(8), rel=1e-7)


def test_the_two_bases_differ_by_log2_of_e(decode, paged):
    query = torch.randn(2, 2, 5, 576).bfloat16()
    cache, tables, lengths = paged([torch.randn(n, 576).bfloat16() for n in (9, 30)], 4)
    two = decode(query, cache, tables, lengths, bmm1_scale=0.1, return_lse=True)[1]
    e = decode(query, cache, tables, lengths, bmm1_scale=0.1, return_lse=True, return_lse_base="basee")[1]
    torch.testing.assert_close(two / e, torch.full_like(e, 1.4426950408889634), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_far_beyond_sixteen_bits_stay_finite(decode, paged, dtype):
    query = torch.full((1, 1, 2, 576), 180.0).to(dtype)
    cache, tables, lengths = paged([torch.full((7, 576), 180.0).to(dtype)], 4)
    out = decode(query, cache, tables, lengths, bmm1_scale=1 / 24, out=torch.empty(1, 1, 2, 512, dtype=dtype))
    assert torch.equal(out, torch.full((1, 1, 2, 512), 180.0).to(dtype))


def test_a_long_alternating_sequence_averages_to_zero(decode, paged):
    latents = (1 - 2 * (torch.arange(100_000) % 2))[:, None].expand(-1, 576).bfloat16()
    cache, tables, lengths = paged([latents], 64)
    out = decode(zeros(1, 1, 1), cache, tables, lengths, out=torch.empty(1, 1, 1, 512))
    assert out.abs().max() < 100_000 * 2.0**-24  # fp32 accumulation of 100,000 terms of size 1/100,000


def test_the_value_is_the_first_512_numbers_and_the_rope_part_stays_out(decode, paged):
    latents = torch.ones(5, 576).bfloat16()
    latents[:, 512:] = 1e4
    query = torch.randn(1, 1, 3, 576).bfloat16()
    query[..., 512:] = 0
    cache, tables, lengths = paged([latents], 4)
    assert torch.equal(decode(query, cache, tables, lengths), torch.ones(1, 1, 3, 512).bfloat16())


def test_the_score_of_both_halves_is_the_sum_of_the_scores_of_each(decode, paged):
    torch.manual_seed(3)
    query, latent = torch.randn(1, 1, 4, 576).bfloat16(), torch.randn(1, 576).bfloat16()
    cache, tables, lengths = paged([latent], 4)
    nope, rope = query.clone(), query.clone()
    nope[..., 512:], rope[..., :512] = 0, 0
    scores = [
        decode(q, cache, tables, lengths, return_lse=True, return_lse_base="basee")[1] for q in (query, nope, rope)
    ]
    torch.testing.assert_close(scores[0], scores[1] + scores[2], rtol=1e-5, atol=1e-4)
