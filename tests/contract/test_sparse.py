"""What sparse lists mean: physical token slots, the first min(n, K) of them, holes skipped, duplicates counted."""

from __future__ import annotations

import math

import pytest
import torch

import mla
from mla.testing import Case, build

CALL = mla.trtllm_batch_decode_with_kv_cache_mla


def sparse(lists: list[list[list[int]]], latents: list[float], length: int, backend: str) -> torch.Tensor:
    """out [B, Q, 512] for q = 0 over a pool of one-token pages, token i filled with latents[i]."""
    tables = torch.tensor(lists, dtype=torch.int32)
    batch, q_len, top_k = tables.shape
    cache = torch.tensor(latents)[:, None, None].expand(-1, 1, 576).bfloat16()
    lengths = torch.full((batch,), length, dtype=torch.int32)
    query = torch.zeros(batch, q_len, 1, 576).bfloat16()
    out = torch.empty(batch, q_len, 1, 512)
    return CALL(query, cache, None, 128, 512, 64, tables, lengths, length, top_k, out=out, backend=backend)[:, :, 0]


def test_duplicates_count_as_often_as_they_stand_there(backend):
    out = sparse([[[0, 0, 1]]], [0.0, 1.0], 3, backend)
    assert out[0, 0].tolist() == pytest.approx([1 / 3] * 512)


def test_only_the_first_min_n_k_entries_count(backend):
    out = sparse([[list(range(8))] * 2], [float(i) for i in range(8)], 5, backend)
    assert out[0, :, 0].tolist() == [1.5, 2.0]
    padded = sparse(
        [[[0, 1, 2, 3, -1, -1, -1, -1], [0, 1, 2, 3, 4, -1, -1, -1]]], [float(i) for i in range(8)], 5, backend
    )
    assert torch.equal(out, padded)


@pytest.mark.parametrize("skip", [-1, -5, -(2**31), 64, 65, 2**31 - 1])
@pytest.mark.parametrize("where", [range(16), range(32), range(63), range(0, 64, 2), range(50, 64)], ids=str)
def test_entries_that_are_no_slot_are_skipped_wherever_they_stand(backend, skip, where):
    whole = [int(i) for i in torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    dug = [skip if i in where else slot for i, slot in enumerate(whole)]
    kept = [slot for i, slot in enumerate(whole) if i not in where]
    latents = [float(i) for i in range(64)]
    out, compact = sparse([[dug]], latents, 64, backend), sparse([[kept]], latents, 64, backend)
    assert out[0, 0, 0].item() == pytest.approx(sum(kept) / len(kept), rel=1e-6)
    assert out[0, 0, 0].item() == pytest.approx(compact[0, 0, 0].item(), rel=1e-6)


def test_a_list_of_holes_is_an_empty_row(backend):
    call = build(Case(lengths=(20,), heads=2, top_k=8, slots="all_holes"))
    out, lse = call.run(CALL, backend=backend)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_the_order_of_a_list_means_nothing(backend):
    call = build(Case(lengths=(60,), heads=3, top_k=40, out="float32"))
    ordered = call.arguments["block_tables"].sort(dim=-1).values
    a = call.run(CALL, backend=backend)[0].clone()
    b = CALL(**call.arguments | {"block_tables": ordered}, backend=backend)[0]
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_slots_are_token_slots_and_not_page_ids(backend):
    cache = torch.arange(12.0)[:, None].expand(12, 576).reshape(3, 4, 576).bfloat16()  # slot s holds s
    out = CALL(
        torch.zeros(1, 1, 1, 576).bfloat16(), cache, None, 128, 512, 64, torch.tensor([[[11, 2, 5]]], dtype=torch.int32),
        torch.tensor([3]), 3, 3, backend=backend,
    )  # fmt: skip
    assert out[0, 0, 0, 0].item() == 6.0


def test_a_sparse_list_of_everything_is_the_dense_answer(backend):
    call = build(Case(lengths=(50,), heads=4, q_len=2, page_size=8, out="float32", sinks="normal"))
    dense = call.run(CALL, backend=backend)[0].clone()
    pages, offsets = call.arguments["block_tables"][0], torch.arange(50)
    slots = (pages[offsets // 8] * 8 + offsets % 8).int().expand(1, 2, 50).contiguous()
    changes = {"block_tables": slots, "sparse_mla_top_k": 50}
    torch.testing.assert_close(CALL(**call.arguments | changes, backend=backend)[0], dense, rtol=1e-6, atol=1e-7)
