"""Writing new tokens into the paged cache, and quantising to e4m3."""

from __future__ import annotations

import math

import pytest
import torch

import mla
from mla.testing import layouts

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["packed", "layers", "wider", "every_second", "offset"])
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_new_tokens_land_behind_the_old_ones_and_nothing_else_changes(device, dtype, layout, page_size):
    torch.manual_seed(0)
    lengths, q_len = [5, 2, 64, 70], 3
    width = math.ceil(70 / page_size)
    tables = torch.randperm(4 * width, device="cpu").view(4, width).to(torch.int32)
    cache, watch = layouts.place(
        "cache", torch.zeros(4 * width, page_size, 576).to(dtype).to(device), layout, "nan", written=True
    )
    before = cache.float().clone()
    latents = torch.randn(4, q_len, 576).to(device)
    result = mla.append_tokens(cache, tables.to(device), torch.tensor(lengths, device=device), latents)
    assert result is cache
    assert not watch.changed()
    stored = latents.to(dtype).float()
    for b, length in enumerate(lengths):
        for t in range(q_len):
            position = length - q_len + t
            if position >= 0:
                page, offset = int(tables[b, position // page_size]), position % page_size
                assert torch.equal(cache[page, offset].float(), stored[b, t])
                before[page, offset] = stored[b, t]
    assert torch.equal(cache.float(), before)


def test_padded_requests_write_nothing():
    cache = torch.full((3, 4, 576), 9.0).bfloat16()
    tables = torch.tensor([[-1], [2**31 - 1], [1]], dtype=torch.int32)
    mla.append_tokens(cache, tables, torch.tensor([0, 1, 1]), torch.zeros(3, 1, 576))
    expected = torch.full((3, 4, 576), 9.0).bfloat16()
    expected[1, 0] = 0.0
    assert torch.equal(cache, expected)
    untouched = cache.clone()
    mla.append_tokens(cache, tables, torch.tensor([0, 1, 5]), torch.ones(3, 1, 576))  # nobody has a place
    assert torch.equal(cache, untouched)
    mla.append_tokens(cache, tables, torch.tensor([0, 0, 0]), torch.ones(3, 0, 576))
    assert torch.equal(cache, untouched)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latents_of_any_strides_are_appended(dtype):
    base = torch.arange(2 * 3 * 576, dtype=torch.float32).remainder(256).view(2, 3, 576).to(dtype)
    for latents in (
        torch.ones(1, 1, 1, dtype=dtype).expand(2, 3, 576),
        base.mT.contiguous().mT,
        base[:, :1].expand(2, 3, 576),
    ):
        cache = torch.zeros(2, 4, 576, dtype=dtype)
        mla.append_tokens(cache, torch.tensor([[0], [1]]), torch.tensor([3, 3]), latents)
        assert torch.equal(cache[:, :3], latents)


def test_a_rank_four_cache_is_written_through():
    cache = torch.zeros(2, 1, 4, 576).bfloat16()
    mla.append_tokens(cache, torch.tensor([[1]]), torch.tensor([2]), torch.ones(1, 2, 576))
    assert cache[1, 0, :2].unique().tolist() == [1.0]
    assert cache.sum().item() == 2 * 576


def test_an_e4m3_cache_is_scaled_and_saturates():
    cache = torch.zeros(1, 4, 576).to(torch.float8_e4m3fn)
    latents = torch.zeros(1, 1, 576)
    latents[0, 0, :4] = torch.tensor([1.0, 1e9, -1e9, math.nan])
    mla.append_tokens(cache, torch.tensor([[0]]), torch.tensor([1]), latents, scale=0.25)
    assert cache[0, 0, :3].float().tolist() == [4.0, 448.0, -448.0]
    assert cache[0, 0, 3].isnan()
    mla.append_tokens(cache, torch.tensor([[0]]), torch.tensor([1]), latents, scale=torch.tensor([0.5]))
    assert cache[0, 0, 0].float().item() == 2.0


def test_appended_tokens_are_what_the_call_reads():
    torch.manual_seed(0)
    latents, query = torch.randn(1, 7, 576).bfloat16(), torch.randn(1, 2, 3, 576).bfloat16()
    cache, tables = torch.full((4, 2, 576), math.nan).bfloat16(), torch.tensor([[3, 0, 2, 1]])
    for start, stop in ((0, 5), (5, 7)):
        mla.append_tokens(cache, tables, torch.tensor([stop]), latents[:, start:stop])
    out = mla.trtllm_batch_decode_with_kv_cache_mla(
        query, cache, None, 128, 512, 64, tables, torch.tensor([7]), 7, bmm1_scale=0.07
    )
    for t in range(2):
        keys = latents[0, : 6 + t].double()
        expected = torch.softmax(0.07 * query[0, t].double() @ keys.T, -1) @ keys[:, :512]
        torch.testing.assert_close(out[0, t].double(), expected, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_chosen_scale_puts_the_largest_number_at_448(dtype):
    torch.manual_seed(0)
    x = (torch.randn(50, 576) * 30).to(dtype)
    quantised, scale = mla.quantize_e4m3(x)
    assert quantised.dtype is torch.float8_e4m3fn
    assert (scale.dtype, scale.shape) == (torch.float32, ())
    assert quantised.float().abs().max().item() == 448.0
    error = (quantised.double() * scale.double() - x.double()).abs()
    assert (error <= 2.0**-4 * x.double().abs() + 2.0**-10 * scale.double() + 1e-6).all()  # e4m3: 4 bits, steps of 2^-9


def test_quantising_zeros_nan_infinities_and_nothing():
    assert mla.quantize_e4m3(torch.zeros(4))[1].item() == 1.0
    assert mla.quantize_e4m3(torch.empty(0, 576))[1].item() == 1.0
    quantised, scale = mla.quantize_e4m3(torch.tensor([math.nan, math.inf, -math.inf, 896.0]))
    assert scale.item() == 2.0
    assert quantised[0].isnan()
    assert quantised[1:].float().tolist() == [448.0, -448.0, 448.0]
    assert mla.quantize_e4m3(torch.full((3,), math.nan))[1].item() == 1.0


def test_a_given_scale_is_used_as_it_is():
    quantised, scale = mla.quantize_e4m3(torch.tensor([1.0, 5000.0]), 2.0)
    assert scale.item() == 2.0
    assert quantised.float().tolist() == [0.5, 448.0]


GOOD = {
    "kv_cache": torch.zeros(2, 4, 576).bfloat16(),
    "block_tables": torch.zeros(1, 2, dtype=torch.int32),
    "seq_lens": torch.ones(1, dtype=torch.int32),
    "latents": torch.ones(1, 1, 576),
}


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"latents": torch.ones(1, 1, 512)}, ValueError, r"latents has shape \[1, 1, 512\]; expected \[B, Q, 576\]"),
        ({"latents": torch.ones(1, 576)}, ValueError, r"latents has shape \[1, 576\]; expected \[B, Q, 576\]"),
        ({"latents": torch.ones(1, 1, 576).int()}, TypeError, r"latents has dtype int32; expected a float"),
        ({"latents": torch.ones(2, 1, 576)}, ValueError, r"block_tables has shape \[1, 2\]; expected \[B, W\] = \[2, W\]"),
        ({"kv_cache": torch.zeros(2, 4, 576).to(torch.float8_e5m2)}, TypeError, r"kv_cache has dtype float8_e5m2; expected"),
        ({"kv_cache": torch.zeros(2, 0, 576)}, ValueError, r"page size 0"),
        ({"seq_lens": torch.ones(1, device="meta", dtype=torch.int32)}, ValueError, r"seq_lens is on meta; expected cpu"),
        ({"scale": 2.0}, ValueError, r"scale is given and kv_cache is bfloat16"),
        ({"scale": -1.0, "kv_cache": torch.zeros(2, 4, 576).to(torch.float8_e4m3fn)}, ValueError, r"scale is -1.0; expected a positive"),
        ({"scale": "1", "kv_cache": torch.zeros(2, 4, 576).to(torch.float8_e4m3fn)}, TypeError, r"scale is a str; expected a float"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_and_nothing_is_written(changes, kind, text):
    arguments = GOOD | changes
    before = arguments["kv_cache"].clone()
    with pytest.raises(kind, match=text):
        mla.append_tokens(**arguments)
    assert torch.equal(before.view(torch.uint8), arguments["kv_cache"].view(torch.uint8))


def test_quantising_something_else_than_floats_is_refused():
    with pytest.raises(TypeError, match="x has dtype int64; expected a float"):
        mla.quantize_e4m3(torch.arange(3))
    with pytest.raises(TypeError, match="x is a list"):
        mla.quantize_e4m3([1.0])
