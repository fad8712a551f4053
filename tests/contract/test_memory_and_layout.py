"""What must not be read changes nothing; strides are honoured; nothing but the outputs is written."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import mla
from mla.testing import Case, build
from mla.testing.case import CHOICES


def outcome(case: Case, backend: str, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a case, after seeing that nothing else was written."""
    call = build(case, device)
    out, lse = call.run(mla.trtllm_batch_decode_with_kv_cache_mla, backend=backend)
    assert call.disturbed() == []
    assert lse is not None
    return out.cpu(), lse.reshape(-1, case.heads).cpu()


def same_bits(case: Case, other: Case, backend: str, device: str = "cpu") -> None:
    (out, lse), (other_out, other_lse) = outcome(case, backend, device), outcome(other, backend, device)
    assert torch.equal(out.reshape(other_out.shape), other_out)
    assert torch.equal(lse, other_lse)


PLAIN = Case(lengths=(13, 0, 64, 3), q_len=4, heads=5, page_size=4, unread="zero", tail="zero")
SPARSE = dataclasses.replace(PLAIN, top_k=20, slots="holes")
E4M3 = {"query": "float8_e4m3fn", "cache": "float8_e4m3fn"}


@pytest.mark.parametrize("base", [PLAIN, SPARSE, dataclasses.replace(PLAIN, **E4M3)], ids=["dense", "sparse", "e4m3"])
@pytest.mark.parametrize("unread", ["nan", "inf", "max", "noise"])
def test_poison_in_unread_slots_changes_no_bit(backend, device, base, unread):
    same_bits(dataclasses.replace(base, unread=unread), base, backend, device)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("unread", ["nan", "max"])
def test_poison_behind_every_length_changes_no_bit(backend, length, unread):
    base = Case(lengths=(length,), heads=2, page_size=4, unread="zero")
    same_bits(dataclasses.replace(base, unread=unread), base, backend)


@pytest.mark.parametrize("tail", ["minus_one", "int_max", "int_min"])
@pytest.mark.parametrize(
    "base", [PLAIN, SPARSE, dataclasses.replace(PLAIN, lengths=(0, 0))], ids=["dense", "sparse", "empty"]
)
def test_ids_past_the_length_are_never_used(backend, device, base, tail):
    base = dataclasses.replace(base, table_slack=5)
    same_bits(dataclasses.replace(base, tail=tail), base, backend, device)


LAYOUTS = [(name, word) for name in CHOICES if name.endswith("_layout") for word in CHOICES[name][1:]]


@pytest.mark.parametrize(("name", "word"), LAYOUTS, ids=[f"{name}={word}" for name, word in LAYOUTS])
@pytest.mark.parametrize("base", [PLAIN, SPARSE], ids=["dense", "sparse"])
def test_a_strided_view_gives_the_bits_of_a_contiguous_copy(backend, device, base, name, word):
    base = dataclasses.replace(base, out="bfloat16", unread="nan")
    same_bits(dataclasses.replace(base, **{name: word}), base, backend, device)


@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 64, 127, 128])
def test_the_same_tokens_give_the_same_bits_at_every_page_size(backend, page_size):
    torch.manual_seed(0)
    query, latents = torch.randn(1, 1, 2, 576).bfloat16(), torch.randn(700, 576).bfloat16()

    def at(size: int) -> torch.Tensor:
        columns = math.ceil(700 / size)
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(size))
        cache = torch.full((columns, size, 576), math.nan).bfloat16()
        cache.view(-1, 576)[: len(latents)] = latents
        shuffled = torch.empty_like(cache)
        shuffled[order] = cache
        lengths = torch.tensor([700])
        return mla.trtllm_batch_decode_with_kv_cache_mla(
            query, shuffled, None, 128, 512, 64, order[None], lengths, 700, bmm1_scale=0.07, backend=backend
        )

    assert torch.equal(at(page_size), at(64))


def test_rank_three_and_four_caches_are_the_same(backend):
    for page_size, lengths in itertools.product((1, 4), ((1,), (9, 2))):
        base = Case(lengths=lengths, heads=3, page_size=page_size, spare_pages=0)
        same_bits(dataclasses.replace(base, cache_rank=4), base, backend)


def test_an_odd_stride_on_the_axis_of_size_one_is_ignored(backend):
    call = build(Case(lengths=(9,), heads=2, page_size=4))
    cache = call.arguments["kv_cache"]
    odd = cache.as_strided((cache.shape[0], 1, 4, 576), (4 * 576, 77, 576, 1), cache.storage_offset())
    function = mla.trtllm_batch_decode_with_kv_cache_mla
    a, b = function(**call.arguments), function(**call.arguments | {"kv_cache": odd})
    assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("base", [PLAIN, SPARSE], ids=["dense", "sparse"])
def test_both_index_dtypes_mean_the_same(backend, base, index):
    same_bits(dataclasses.replace(base, tables=index, lens=index), base, backend)


@pytest.mark.parametrize("slack", [0, 1, 3, 10])
def test_any_table_width_will_do(backend, slack):
    for page_size in (1, 16, 32, 64, 128):
        base = Case(lengths=(130, 33), heads=2, page_size=page_size, table_slack=0)
        same_bits(dataclasses.replace(base, table_slack=slack), base, backend)


@pytest.mark.parametrize("slack", [1, 64, 1 << 20, (1 << 31) - 200])
def test_max_seq_len_is_a_bound_and_means_nothing(backend, slack):
    same_bits(dataclasses.replace(PLAIN, max_slack=slack), PLAIN, backend)


def test_a_max_seq_len_below_the_lengths_truncates_nothing(backend):
    call = build(Case(lengths=(100,), heads=2))
    right = call.run(mla.trtllm_batch_decode_with_kv_cache_mla, backend=backend)[0]
    low = mla.trtllm_batch_decode_with_kv_cache_mla(**call.arguments | {"max_seq_len": 10}, backend=backend)[0]
    assert torch.equal(right, low)


@pytest.mark.parametrize("kind", ["empty", "zeros", "ones", "noise"])
def test_the_workspace_has_no_meaning(backend, kind):
    same_bits(dataclasses.replace(PLAIN, workspace=kind), PLAIN, backend)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float32, torch.bfloat16, torch.complex64])
def test_the_workspace_is_bytes_of_any_dtype(backend, dtype):
    call = build(PLAIN)
    scratch = torch.zeros(1001, dtype=dtype)[1:]
    out, _ = mla.trtllm_batch_decode_with_kv_cache_mla(
        **call.arguments | {"workspace_buffer": scratch}, backend=backend
    )
    assert torch.equal(out, outcome(PLAIN, backend)[0])


def test_padded_requests_change_no_bit_of_real_ones(backend):
    call = build(Case(lengths=(130, 1), heads=4))
    arguments = call.arguments
    tables = torch.full((5, arguments["block_tables"].shape[1]), -1, dtype=torch.int32)
    tables[:2] = arguments["block_tables"]
    query = torch.full((5, 1, 4, 576), math.nan, dtype=torch.bfloat16)
    query[:2] = arguments["query"]
    lengths = torch.zeros(5, dtype=torch.int32)
    lengths[:2] = arguments["seq_lens"]
    stale = torch.full((5, 1, 4, 512), math.nan, dtype=torch.bfloat16)
    changes = {"query": query, "block_tables": tables, "seq_lens": lengths, "out": stale, "max_seq_len": 1 << 20}
    out, lse = mla.trtllm_batch_decode_with_kv_cache_mla(**arguments | changes, backend=backend)
    alone, alone_lse = call.run(mla.trtllm_batch_decode_with_kv_cache_mla, backend=backend)
    assert torch.equal(out[:2], alone)
    assert torch.equal(lse[:2], alone_lse)
    assert torch.equal(out[2:], torch.zeros(3, 1, 4, 512).bfloat16())
    assert torch.equal(lse[2:], torch.full((3, 4), -math.inf))


def test_a_row_has_the_same_bits_alone_and_among_others(backend):
    lengths = (700, 3, 64, 1, 0, 129, 2050)
    call = build(Case(lengths=lengths, heads=6, q_len=2))
    out, lse = call.run(mla.trtllm_batch_decode_with_kv_cache_mla, backend=backend)
    for b in range(len(lengths)):
        alone = {name: call.arguments[name][b : b + 1] for name in ("query", "block_tables", "seq_lens")}
        one, one_lse = mla.trtllm_batch_decode_with_kv_cache_mla(**call.arguments | alone, backend=backend)
        assert torch.equal(one[0], out[b])
        assert torch.equal(one_lse, lse[2 * b : 2 * b + 2])


def test_twenty_repeats_give_the_same_bits_whatever_fresh_memory_holds(backend):
    first = outcome(SPARSE, backend)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, outcome(SPARSE, backend), strict=True))


def test_a_nan_that_one_token_sees_reaches_no_earlier_token_and_no_other_request(backend):
    clean = build(Case(lengths=(6, 9, 12), q_len=4, heads=3, page_size=4))
    out, lse = clean.run(mla.trtllm_batch_decode_with_kv_cache_mla, backend=backend)
    cache = clean.arguments["kv_cache"].clone()
    page = clean.arguments["block_tables"][1, 1]  # position 7 of request 1: tokens 2 and 3 see it
    cache[page, 3] = math.nan
    sick, sick_lse = mla.trtllm_batch_decode_with_kv_cache_mla(**clean.arguments | {"kv_cache": cache}, backend=backend)
    sees = torch.zeros(3, 4, dtype=torch.bool)
    sees[1, 2:] = True
    assert sick[sees].isnan().all()
    assert torch.equal(sick[~sees], out[~sees])
    assert sick_lse.view(3, 4, 3)[sees].isnan().all()
    assert torch.equal(sick_lse.view(3, 4, 3)[~sees], lse.view(3, 4, 3)[~sees])


def test_nan_in_padded_query_tokens_stays_in_them(backend):
    call = build(Case(lengths=(9, 20), q_len=3, heads=2))
    query = call.arguments["query"].clone()
    query[0, 0] = query[1, 2] = math.nan
    out, _ = mla.trtllm_batch_decode_with_kv_cache_mla(**call.arguments | {"query": query}, backend=backend)
    clean, _ = call.run(mla.trtllm_batch_decode_with_kv_cache_mla, backend=backend)
    kept = torch.ones(2, 3, dtype=torch.bool)
    kept[0, 0] = kept[1, 2] = False
    assert torch.equal(out[kept], clean[kept])
    assert out[~kept].isnan().all()


@pytest.mark.parametrize("page", [-1, 6, 2**31 - 1, -(2**31)])
def test_a_visible_page_outside_the_pool_is_loud_and_harms_no_other_row(backend, page):
    call = build(Case(lengths=(9, 9), heads=2, page_size=4, spare_pages=0))
    tables = call.arguments["block_tables"].clone()
    tables[0, 2] = page
    out, _ = mla.trtllm_batch_decode_with_kv_cache_mla(**call.arguments | {"block_tables": tables}, backend=backend)
    clean, _ = call.run(mla.trtllm_batch_decode_with_kv_cache_mla, backend=backend)
    assert torch.equal(out[1], clean[1])
    assert out[0].isnan().all()


def test_a_length_that_the_table_cannot_hold_is_loud(backend):
    call = build(Case(lengths=(9, 9), heads=2, page_size=4, table_slack=0))
    lengths = torch.tensor([13, 9], dtype=torch.int32)
    out, _ = mla.trtllm_batch_decode_with_kv_cache_mla(**call.arguments | {"seq_lens": lengths}, backend=backend)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize("top_k", [0, 3])
def test_an_empty_pool_serves_empty_requests(backend, top_k):
    tables = torch.full((2, 1, 3) if top_k else (2, 1), -1, dtype=torch.int32)
    out, lse = mla.trtllm_batch_decode_with_kv_cache_mla(
        torch.randn(2, 1, 4, 576).bfloat16(), torch.empty(0, 64, 576).bfloat16(), None, 128, 512, 64, tables,
        torch.tensor([0, 3 if top_k else 0]), 0, top_k, return_lse=True, backend=backend,
    )  # fmt: skip
    assert torch.equal(out, torch.zeros(2, 1, 4, 512).bfloat16())
    assert torch.equal(lse, torch.full((2, 4), -math.inf))


def test_a_negative_length_is_an_empty_request(backend):
    call = build(Case(lengths=(5,), heads=2))
    lengths = torch.tensor([-7], dtype=torch.int32)
    out, lse = mla.trtllm_batch_decode_with_kv_cache_mla(**call.arguments | {"seq_lens": lengths}, backend=backend)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_only_the_rows_in_use_are_read_from_a_large_pool():
    tracemalloc_pool = torch.empty(20_000, 64, 576, dtype=torch.float8_e4m3fn)  # 737 MB, never touched
    tracemalloc_pool[7] = 1.0
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        mla.trtllm_batch_decode_with_kv_cache_mla(
            torch.zeros(1, 1, 4, 576).bfloat16(), tracemalloc_pool, None, 128, 512, 64,
            torch.tensor([[7]], dtype=torch.int32), torch.tensor([64]), 64, backend="reference",
        )  # fmt: skip
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in seen.key_averages())
    assert allocated < 50e6


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 20, 96, 130])
def test_heads_do_not_mix(backend, heads):
    call = build(Case(lengths=(33, 5), q_len=2, heads=heads, sinks="normal", out="float32", out_layout="sliced"))
    out, lse = call.run(mla.trtllm_batch_decode_with_kv_cache_mla, backend=backend)
    assert call.disturbed() == []
    for h in (0, heads // 2, heads - 1):
        one = {
            "query": call.arguments["query"][:, :, h : h + 1],
            "sinks": call.arguments["sinks"][h : h + 1],
            "out": None,
        }
        single, single_lse = mla.trtllm_batch_decode_with_kv_cache_mla(**call.arguments | one, backend=backend)
        torch.testing.assert_close(single[:, :, 0].float(), out[:, :, h], rtol=2.0**-8, atol=1e-6)
        torch.testing.assert_close(single_lse[:, 0], lse[:, h], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [0, 32])
def test_addresses_past_two_to_the_31_elements_are_right(backend, top_k):
    near = Case(lengths=(70, 3), heads=2, tail="zero", top_k=top_k, query="float8_e4m3fn", cache="float8_e4m3fn")
    far = dataclasses.replace(near, far_pages=58_300)  # 2.15 GB of e4m3, of which a few pages are ever touched
    assert 58_300 * 64 * 576 > 2**31
    same_bits(far, near, backend)
