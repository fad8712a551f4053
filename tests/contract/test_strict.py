"""The strict mode reads device values and names the row and column of the first wrong one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

import mla
from mla.testing import Case, build

CALL = mla.trtllm_batch_decode_with_kv_cache_mla
DENSE = build(Case(lengths=(9, 3, 0), heads=2, page_size=4, out="bfloat16", spare_pages=1, table_slack=2))
SPARSE = build(Case(lengths=(9, 3), q_len=2, heads=2, page_size=4, top_k=6))


def changed(call, name, *place_and_value):
    *place, value = place_and_value
    tensor = call.arguments[name].clone()
    tensor[tuple(place)] = value
    return call.arguments | {name: tensor}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (changed(DENSE, "block_tables", 0, 2, 5), r"block_tables\[0, 2\] is page 5; expected 0 <= page < 5.*row 0 has length 9, so its first 3"),
        (changed(DENSE, "block_tables", 1, 0, -1), r"block_tables\[1, 0\] is page -1; expected 0 <= page < 5"),
        (changed(DENSE, "seq_lens", 1, -2), r"seq_lens\[1\] is -2; expected a length >= 0"),
        (changed(DENSE, "seq_lens", 2, 10), r"seq_lens\[2\] is 10; expected at most max_seq_len = 9"),
        (changed(DENSE, "seq_lens", 2, 21) | {"max_seq_len": 99}, r"seq_lens\[2\] is 21; expected at most 20, what 5 table columns of page size 4"),
        (changed(SPARSE, "block_tables", 1, 1, 2, 20), r"block_tables\[1, 1, 2\] is slot 20; expected a slot < 20, .* negative number for a hole"),
        (DENSE.arguments | {"bmm1_scale": torch.tensor(float("nan"))}, r"bmm1_scale holds nan; expected a finite number"),
        (DENSE.arguments | {"bmm2_scale": torch.tensor(float("inf"))}, r"bmm2_scale holds inf; expected a finite number"),
        (DENSE.arguments | {"sinks": torch.tensor([0.0, float("nan")])}, r"sinks\[1\] is nan; expected a finite number, or -inf"),
        (DENSE.arguments | {"sinks": torch.tensor([float("inf"), 0.0])}, r"sinks\[0\] is inf; expected a finite number, or -inf"),
    ],
)  # fmt: skip
def test_a_wrong_device_value_is_named_by_row_and_column_and_nothing_is_written(arguments, text):
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with mla.strict(), pytest.raises(ValueError, match=text):
        CALL(**arguments)
    assert all(
        torch.equal(value.view(torch.uint8), arguments[name].view(torch.uint8))
        for name, value in before.items()
        if value.ndim
    )


@pytest.mark.parametrize("call", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_a_right_call_passes_and_gives_the_same_bits(call):
    loose = CALL(**call.arguments)[0].clone()
    with mla.strict():
        assert torch.equal(CALL(**call.arguments)[0], loose)


def test_what_is_not_read_is_not_judged():
    tables = DENSE.arguments["block_tables"].clone()
    tables[1, 1:] = 2**31 - 1
    tables[2] = -1
    with mla.strict():
        CALL(**DENSE.arguments | {"block_tables": tables})


def test_negative_slots_are_legal_holes_and_slots_past_the_visible_ones_are_not_judged():
    slots = SPARSE.arguments["block_tables"].clone()
    slots[0, 0, 0] = -(2**31)
    slots[1, 0, 2:] = 2**31 - 1
    with mla.strict():
        CALL(**SPARSE.arguments | {"block_tables": slots})


def test_it_is_off_by_default_and_after_the_block_and_can_be_switched_off_inside():
    wrong = changed(DENSE, "seq_lens", 2, 10)
    CALL(**wrong)
    with mla.strict():
        with mla.strict(False):
            CALL(**wrong)
        with pytest.raises(ValueError, match="seq_lens"):
            CALL(**wrong)
    CALL(**wrong)


@pytest.mark.parametrize(("value", "raises"), [("1", True), ("0", False), ("", False), ("yes", True)])
def test_the_environment_variable_does_it_for_the_process(value, raises):
    code = (
        "import mla\nfrom mla.testing import Case, build\nimport torch\n"
        "call = build(Case(lengths=(9,)))\n"
        "mla.trtllm_batch_decode_with_kv_cache_mla(**call.arguments | {'seq_lens': torch.tensor([10]), 'max_seq_len': 9})\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"MLA_STRICT": value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode != 0) is raises, run.stderr
    assert ("seq_lens[0] is 10" in run.stderr) is raises


def test_values_can_be_checked_without_a_call():
    mla.check_values(DENSE.problem)
    with pytest.raises(ValueError, match="max_seq_len = 1"):
        mla.check_values(dataclasses.replace(DENSE.problem, max_seq_len=1))


def test_it_cannot_be_used_inside_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph capture forbids"):
        mla.check_values(dataclasses.replace(DENSE.problem, device=torch.device("cuda:0")))
