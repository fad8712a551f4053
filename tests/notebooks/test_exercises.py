"""The exercises: right answers are right, wrong ones are not, and no committed notebook has one solved."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mla.testing.faults import FAULTS, judged_wrong

pytest.importorskip("numpy")

ANSWERS: dict[str, Any] = {
    "01-bytes": 1152,
    "01-ratio": 71,
    "01-position": "rotation",
    "02-slot-of-8": 16,
    "02-pages": 7,
    "02-waste": 188,
    "03-scaled": 7,
    "03-sink": 1,
    "03-lse": 4,
    "03-list": 6.33,
    "04-two-parts": 4,
    "04-weights": 5,
    "04-sink": 4,
    "05-first": 5,
    "05-length": 103,
    "05-blocks": 1,
    "06-entry": 64005,
    "06-mean": 5,
    "06-sink": 6,
    "07-saturated": 896,
    "07-bmm2": 0.25,
    "07-exact": 18,
    "08-programs": 12,
    "08-loads": 4,
    "08-address": 2211840000,
    "09-lane": 6,
    "09-products": 144,
    "09-registers": 32,
    "10-A": "mask-from-the-top",
    "10-B": "log2e-forgotten",
    "10-C": "values-from-the-last-columns",
    "10-D": "sink-times-bmm1",
    "10-E": "tile-tail-counts-as-zero-keys",
    "10-F": "duplicates-merged",
    "10-G": "page-size-taken-for-64",
    "10-H": "bmm2-in-the-scores",
    "11-corner": 200,
    "11-limit": "memory",
    "11-limit-of-two": "arithmetic",
    "11-floor": 1152,
    "12-auto": "reference",
    "12-refused": "raises",
}


def absorb(q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.stack([w[h].T @ q[h] for h in range(len(q))])


def slot(tables: torch.Tensor, b: int, j: int, page_size: int) -> int:
    return int(tables[b, j // page_size]) * page_size + j % page_size


def merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[Any, Any]:
    top = torch.maximum(lse_a, lse_b)
    a, b = torch.exp2(lse_a - top), torch.exp2(lse_b - top)
    return (a[:, None] * out_a + b[:, None] * out_b) / (a + b)[:, None], top + torch.log2(a + b)


def visible(length: int, q_len: int, t: int) -> int:
    return max(length - q_len + t + 1, 0)


def counted(entries: list[int], n: int, pool: int) -> list[int]:
    return [entry for entry in entries[:n] if 0 <= entry < pool]


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    scale = float(x.abs().max()) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def several(
    *, query: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, **others: Any
) -> torch.Tensor:
    batch, q_len, heads, _ = query.shape
    page_size = kv_cache.shape[1]
    out = torch.zeros(batch, q_len, heads, 512)
    for b in range(batch):
        for t in range(q_len):
            n = visible(int(seq_lens[b]), q_len, t)
            slots = [slot(block_tables, b, j, page_size) for j in range(n)]
            keys = kv_cache.flatten(0, 1)[slots].float()
            weights = torch.softmax(others["bmm1_scale"] * (query[b, t].float() @ keys.T), dim=-1)
            out[b, t] = others["bmm2_scale"] * (weights @ keys[:, :512])
    return out.to(torch.bfloat16)


def several_first_lengths(**arguments: Any) -> torch.Tensor:
    return several(**(arguments | {"seq_lens": arguments["seq_lens"][:1].expand(len(arguments["seq_lens"]))}))


SOLVED: dict[str, Callable[..., Any]] = {
    "01-absorb": absorb,
    "02-slot": slot,
    "04-merge": merge,
    "05-visible": visible,
    "06-counted": counted,
    "07-quantize": quantize,
    "08-mean": lambda x, n: x[:n].mean(0),
    "09-owner": lambda row, column: (row % 8 * 4 + column // 2, row // 8 * 2 + column % 2),
    "12-several": several,
}

MISTAKEN: dict[str, Callable[..., Any]] = {
    "01-absorb": lambda q, w: absorb(-q, w),
    "02-slot": lambda tables, b, j, page_size: int(tables[b, j // page_size]),
    "04-merge": lambda out_a, lse_a, out_b, lse_b: merge(out_a, lse_a / 2, out_b, lse_b),
    "05-visible": lambda length, q_len, t: length - q_len + t + 1,
    "06-counted": lambda entries, n, pool: [entry for entry in entries if 0 <= entry < pool][:n],
    "07-quantize": lambda x: (x.to(torch.float8_e4m3fn), 1.0),
    "08-mean": lambda x, n: x.nansum(0) / len(x),
    "09-owner": lambda row, column: (row % 8 * 4 + column % 4, row // 8 * 2 + column // 4),
    "12-several": several_first_lengths,
}


def test_every_exercise_has_an_answer_here(exercises: Any) -> None:
    assert set(exercises.FINGERPRINTS) == set(ANSWERS)
    assert set(exercises.FUNCTIONS) == set(SOLVED) == set(MISTAKEN)


def test_every_exercise_stands_in_its_notebook_and_is_not_solved_there(exercises: Any, folder: Path) -> None:
    asked = {}
    for path in folder.glob("[0-9][0-9]_*.py"):
        for name, answer in re.findall(r'^check\("([^"]*)", (\w+)\)$', path.read_text(), re.M):
            assert name.startswith(path.name[:2]), name
            assert name not in asked, name
            asked[name] = answer
    assert set(asked) == {*exercises.FINGERPRINTS, *exercises.FUNCTIONS}
    assert {asked[name] for name in exercises.FINGERPRINTS} == {"None"}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_right_answer_is_right_and_another_is_wrong(name: str, exercises: Any) -> None:
    answer = ANSWERS[name]
    assert exercises.verdict(name, answer) == exercises.RIGHT
    other = f"not {answer}" if isinstance(answer, str) else [0] if isinstance(answer, list) else answer + 1
    assert exercises.verdict(name, other).startswith("wrong: ")
    assert exercises.verdict(name, None) == exercises.OPEN


@pytest.mark.parametrize("name", SOLVED)
def test_a_right_function_is_right_and_a_mistaken_one_is_wrong(name: str, exercises: Any) -> None:
    assert exercises.verdict(name, SOLVED[name]) == exercises.RIGHT
    assert exercises.verdict(name, MISTAKEN[name]).startswith("wrong: ")
    assert exercises.verdict(name, lambda *given, **named: None) == exercises.OPEN
    assert exercises.verdict(name, 7).startswith("wrong: it is a int")


def test_the_broken_kernels_have_the_faults_that_the_answers_name(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    broken = load("broken_kernels")
    assert list(broken.SUSPECTS) == sorted(set(broken.SUSPECTS))
    assert "".join(broken.kernels()) == broken.LETTERS
    for letter, kernel in broken.kernels().items():
        fault = FAULTS[ANSWERS[f"10-{letter}"]]
        assert repr(kernel) == f"kernel {letter}"
        (case, *_) = (case for case in fault.shown_by if judged_wrong(fault, case))
        with pytest.raises(AssertionError):
            fault.judge(kernel, case, "cpu")


def test_a_function_that_raises_is_wrong_and_says_how(exercises: Any) -> None:
    def broken(*given: Any) -> None:
        raise ZeroDivisionError("division by zero")

    assert exercises.verdict("02-slot", broken) == "wrong: it raised ZeroDivisionError: division by zero"


def test_an_unknown_exercise_names_the_known_ones(exercises: Any) -> None:
    with pytest.raises(ValueError, match=r"name is '99-x'; expected one of 01-bytes, "):
        exercises.verdict("99-x", 1)


def test_printing_says_which_exercise_it_was(exercises: Any, capsys: pytest.CaptureFixture[str]) -> None:
    exercises.check("03-lse", 4.0)
    assert capsys.readouterr().out == "03-lse: right\n"
