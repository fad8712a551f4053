"""The tensors of a case: every page used once, lists in one's own pages, and nothing wider than it must be."""

from __future__ import annotations

import pytest
import torch

from mla.bench import inputs
from mla.bench.cases import BenchCase
from mla.problem import Problem
from mla.strict import check_values

CPU = torch.device("cpu")
DENSE = BenchCase("dense", (100, 5, 64, 129), heads=2, q_len=2, page_size=32)
SPARSE = BenchCase("sparse", (100, 40), heads=2, q_len=3, page_size=16, top_k=48)


def test_every_page_belongs_to_one_request_and_they_are_shuffled() -> None:
    made = inputs.make(DENSE, CPU)
    pages = [made.tables[b, : -(-n // 32)].tolist() for b, n in enumerate(DENSE.lengths)]
    flat = [page for row in pages for page in row]
    assert sorted(flat) == list(range(len(made.pool)))
    assert flat != sorted(flat)
    assert made.tables.shape == (4, 5)
    assert made.lengths.tolist() == list(DENSE.lengths)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("case", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_the_arguments_are_a_legal_call(case: BenchCase, dtype: str) -> None:
    made = inputs.make(BenchCase(case.name, case.lengths, 2, case.q_len, case.page_size, dtype, case.top_k), CPU)
    problem = Problem.from_call(**made.arguments(None))
    check_values(problem)
    assert problem.query.dtype is problem.kv_cache.dtype is inputs.TORCH_DTYPES[dtype]


def test_a_list_holds_distinct_tokens_of_its_own_request_and_then_nothing() -> None:
    made = inputs.make(SPARSE, CPU)
    assert made.slots is not None
    for b, length in enumerate(SPARSE.lengths):
        own = {int(made.tables[b, j // 16]) * 16 + j % 16 for j in range(length)}
        for row in made.slots[b].tolist():
            assert row == made.slots[b, 0].tolist()
            counted, rest = row[: min(length, 48)], row[min(length, 48) :]
            assert len(set(counted)) == len(counted)
            assert set(counted) <= own
            assert set(rest) <= {-1}


def test_numbers_are_normal_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "CHUNK", 1000)  # many pieces
    first, second = inputs.make(DENSE, CPU), inputs.make(DENSE, CPU)
    assert torch.equal(first.pool, second.pool)
    assert not torch.equal(first.pool, inputs.make(DENSE, CPU, seed=1).pool)
    pool = first.pool.float()
    assert abs(float(pool.mean())) < 5 / len(pool.view(-1)) ** 0.5
    assert float(pool.std()) == pytest.approx(1, abs=0.02)


def test_a_larger_bound_widens_the_tables_and_a_smaller_one_is_refused() -> None:
    made = inputs.make(DENSE, CPU, max_seq_len=1000)
    assert made.arguments(None)["max_seq_len"] == 1000
    assert made.tables.shape[1] == 32
    with pytest.raises(ValueError, match="max_seq_len is 100; case dense has a request of 129 tokens"):
        inputs.make(DENSE, CPU, max_seq_len=100)
