"""What the contract leaves to a backend: pages that are not there, lengths that the table cannot hold. No fault, and
NaN in the rows that see it alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla.backends.xqa.emulator.backend import EmulatedBackend
from mla.testing import Case, build

CASE = Case(lengths=(70, 40), q_len=3, heads=4, page_size=16, table_slack=2, tail="int_max")


def run(problem):
    out = torch.empty(problem.batch, problem.q_len, problem.num_heads, 512)
    lse = torch.empty(problem.batch, problem.q_len, problem.num_heads)
    EmulatedBackend().run(problem, out, lse)
    return out, lse


def rows_with_nan(out, lse):
    """[B, Q]: rows that are NaN in every element; that no row is so in part is asserted."""
    whole = out.isnan().all(dim=-1) & lse.isnan()
    assert torch.equal(whole, out.isnan().any(dim=-1)), "a row is NaN in part"
    assert torch.equal(whole.all(dim=-1), whole.any(dim=-1)), "heads differ"
    return whole.all(dim=-1)


@pytest.mark.parametrize("page", [-1, -(2**31), 2**31 - 1, 2**40, -(2**40)])
def test_a_page_outside_the_pool_makes_the_rows_that_see_it_nan(page):
    call = build(replace(CASE, tables="int64"))
    p = call.problem
    clean, clean_lse = run(p)
    p.block_tables[0, 4] = page  # tokens 64 to 79: query tokens 0, 1, 2 see 68, 69, 70 tokens
    p.block_tables[1, 2] = page  # tokens 32 to 47, of which they see 38, 39, 40
    out, lse = run(p)
    assert rows_with_nan(out, lse).all()
    p.block_tables[1, 2] = build(CASE).problem.block_tables[1, 2]
    out, lse = run(p)
    assert rows_with_nan(out, lse).tolist() == [[True] * 3, [False] * 3]
    assert torch.equal(out[1], clean[1])
    assert torch.equal(lse[1], clean_lse[1])


def test_only_the_query_tokens_that_see_the_page_are_nan():
    call = build(replace(CASE, lengths=(66, 40)))
    p = call.problem
    clean, _ = run(p)
    p.block_tables[0, 4] = p.num_pages  # tokens 64 and 65: query tokens 0, 1, 2 see 64, 65, 66 tokens
    out, lse = run(p)
    assert rows_with_nan(out, lse).tolist() == [[False, True, True], [False] * 3]
    assert torch.equal(out[0, 0], clean[0, 0])


@pytest.mark.parametrize("too_many", [1, 2, 1000, 2**31 - 1 - 80, 2**40])
def test_a_length_past_the_table_makes_the_rows_that_see_past_it_nan(too_many):
    call = build(replace(CASE, lengths=(80, 40), table_slack=0, lens="int64"))
    p = call.problem
    clean, _ = run(p)
    p.seq_lens[0] = 80 + too_many  # the table holds 80
    out, lse = run(p)
    sees_past = [80 + too_many - 3 + t + 1 > 80 for t in range(3)]
    assert rows_with_nan(out, lse).tolist() == [sees_past, [False] * 3]
    assert torch.equal(out[1], clean[1])


@pytest.mark.parametrize("length", [-1, -(2**31), -(2**40)])
def test_a_negative_length_is_an_empty_request(length):
    call = build(replace(CASE, lens="int64"))
    p = call.problem
    p.seq_lens[0] = length
    out, lse = run(p)
    assert out[0].eq(0).all()
    assert lse[0].eq(-torch.inf).all()
    assert out[1].isfinite().all()


def test_a_table_without_columns_and_a_pool_without_pages():
    call = build(Case(lengths=(0, 0), q_len=2, heads=4, spare_pages=0, table_slack=0))
    p = call.problem
    assert p.num_pages == 0
    assert p.block_tables.shape[1] == 0
    out, lse = run(p)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    p.seq_lens[1] = 5
    out, lse = run(p)
    assert rows_with_nan(out, lse).tolist() == [[False, False], [True, True]]


def test_sparse_slots_beyond_any_pool_are_skipped():
    call = build(Case(lengths=(60, 50), top_k=40, heads=4, tables="int64"))
    p = call.problem
    clean, clean_lse = run(p)
    kept = p.block_tables[0, 0].clone()
    p.block_tables[0, 0, :20] = torch.tensor([2**31, 2**40, -(2**40), -1, 2**62] * 4)
    out, lse = run(p)
    assert out.isfinite().all()
    assert torch.equal(out[1], clean[1])
    assert not torch.equal(lse[0], clean_lse[0])
    p.block_tables[0, 0] = torch.cat([kept[20:], kept[:20]])  # another order of all
    assert torch.allclose(run(p)[1], clean_lse, atol=1e-5)


@pytest.mark.parametrize("requests", [128, 129], ids=["measured by each warp", "read in `begins`"])
def test_requests_are_joined_however_many_there_are(emulate, requests):
    lengths = [0, 5, 3] * (requests // 3)
    lengths += [200] * (requests - len(lengths))  # the last ones are what teams share
    emulate(Case(lengths=tuple(lengths), heads=2, page_size=64), teams=40, watch=False)
