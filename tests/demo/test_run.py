"""The demo runs end to end, says what it must, and fails when something is wrong."""

from __future__ import annotations

import io
import math
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mla
from mla import progress as progress_module
from mla.demo.layer import AttentionLayer
from mla.demo.picture import NO_MATPLOTLIB
from mla.demo.run import run_demo
from mla.demo.storage import CONFIGURATIONS, E4M3, budget, stored
from mla.progress import progress

FEW = {"tokens": 100, "steps": 3, "seed": 0, "device": "cpu", "small": True}
NAMES = ["bf16 query, bf16 cache", "bf16 query, e4m3 cache", "e4m3 query, e4m3 cache"]


def verdicts(output: str) -> list[str]:
    """The last word of each configuration's line of errors."""
    return [re.search(rf"^{name} .* (pass|FAIL)$", output, re.MULTILINE)[1] for name in NAMES]  # type: ignore[index]


def shares(output: str) -> list[float]:
    """max / budget of each configuration."""
    return [float(share) for share in re.findall(r"([\d.]+)  pass$", output, re.MULTILINE)]


def test_the_small_demo_passes_and_says_what_ran_how_wrong_it_was_and_what_it_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "demo.png"
    assert run_demo(**FEW, picture=str(picture)) == 0
    output, progress_lines = capsys.readouterr()
    assert "hidden size 512, 4 heads, q_lora_rank 256" in output
    assert "Prefill 100 tokens, then 3 steps of 2 tokens" in output
    assert "backend='auto' runs: reference" in output
    for name in mla.backends():
        assert re.search(rf"^  {name}: (not considered .* by name: )?(accepts|refused|broken)$", output, re.MULTILINE)
    assert "bfloat16 query, float8_e4m3fn cache" in output
    assert "Budget: 2 times the largest error of plain un-absorbed float64 attention" in output
    assert verdicts(output) == ["pass"] * 3
    assert "the keys and values of 4 heads in bf16 are 2560" in output
    assert "bf16 latents: 1152, 2.2 times fewer" in output
    assert "e4m3 latents: 576, 4.4 times fewer" in output
    assert re.search(r"^Milliseconds per step +projections +storing +attention call$", output, re.MULTILINE)
    assert f"The picture of each token's error is in {picture}." in output
    percents = [int(line.split("%")[0]) for line in progress_lines.splitlines()]
    assert percents == sorted(percents)
    assert "decoding: e4m3 query, e4m3 cache" in progress_lines


def test_the_picture_is_a_png_of_a_size_to_look_at(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    run_demo(**FEW, picture=str(picture))
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1000
    assert height >= 500
    assert len(data) > 15_000  # an empty canvas of this size takes a third of it


def test_without_a_picture_nothing_is_drawn_or_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_demo(**FEW, picture=None) == 0
    assert "picture" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_so_in_one_sentence_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = tmp_path / "demo.png"
    assert run_demo(**FEW, picture=str(picture)) == 0
    assert capsys.readouterr().out.rstrip().endswith(NO_MATPLOTLIB)
    assert 'pip install "mla[demo]"' in NO_MATPLOTLIB
    assert not picture.exists()


@pytest.mark.filterwarnings("ignore:backend='auto' runs the reference")  # on a GPU, until a kernel is there
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (63, 4), (200, 2)])
def test_the_budget_is_kept_and_is_not_loose(
    seed: int, tokens: int, steps: int, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every error is at least a twentieth of its budget: a budget that nothing could break would prove nothing."""
    assert run_demo(tokens=tokens, steps=steps, picture=None, seed=seed, device=device, small=True) == 0
    found = shares(capsys.readouterr().out)
    assert len(found) == 3
    assert all(0.05 < share <= 1.0 for share in found)


def scaled(name: str, factor: float) -> Callable[[dict[str, Any]], None]:
    def fault(call: dict[str, Any]) -> None:
        call[name] = call[name] * factor

    return fault


def forgotten_k_scale(call: dict[str, Any]) -> None:
    call["bmm1_scale"] = call["bmm1_scale"] / call["bmm2_scale"]


def forgotten_v_scale(call: dict[str, Any]) -> None:
    call["bmm2_scale"] = 1.0


def one_token_too_few(call: dict[str, Any]) -> None:
    call["seq_lens"] = call["seq_lens"] - 1


def pages_in_order(call: dict[str, Any]) -> None:
    call["block_tables"] = call["block_tables"].sort(dim=-1).values


def query_without_position(call: dict[str, Any]) -> None:
    call["query"] = call["query"].clone()
    call["query"][..., 512:] = 0


FAULTS = [
    pytest.param(scaled("bmm1_scale", 192**-0.5), ["FAIL"] * 3, id="root-forgotten-in-the-softmax-scale"),
    pytest.param(scaled("bmm1_scale", 3**-0.5), ["FAIL"] * 3, id="softmax-scale-from-576"),
    pytest.param(scaled("bmm1_scale", math.log2(math.e)), ["FAIL"] * 3, id="scores-in-base-2"),
    pytest.param(scaled("bmm2_scale", 1.02), ["FAIL", "pass", "pass"], id="output-two-percent-too-large"),
    pytest.param(forgotten_k_scale, ["pass", "FAIL", "FAIL"], id="k-scale-forgotten"),
    pytest.param(forgotten_v_scale, ["pass", "FAIL", "FAIL"], id="v-scale-forgotten"),
    # one key of a hundred is less than what e4m3 rounds away: only bf16 can show it
    pytest.param(one_token_too_few, ["FAIL", "pass", "pass"], id="one-token-too-few"),
    pytest.param(pages_in_order, ["FAIL"] * 3, id="table-ignored"),
    pytest.param(query_without_position, ["FAIL"] * 3, id="rotated-part-dropped"),
]


@pytest.mark.parametrize(("fault", "expected"), FAULTS)
def test_a_wrong_call_breaks_the_budget_of_the_configurations_it_touches(
    fault: Callable[[dict[str, Any]], None],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = mla.trtllm_batch_decode_with_kv_cache_mla

    def wrong(**call: Any) -> Any:
        fault(call)
        return right(**call)

    monkeypatch.setattr(mla, "trtllm_batch_decode_with_kv_cache_mla", wrong)
    assert run_demo(**FEW, picture=None) == 1
    assert verdicts(capsys.readouterr().out) == expected


def test_a_single_nan_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = AttentionLayer.project_out
    monkeypatch.setattr(
        AttentionLayer, "project_out", lambda layer, x: right(layer, x).index_fill(1, torch.tensor(1), math.nan)
    )
    assert run_demo(**FEW, picture=None) == 1
    assert verdicts(capsys.readouterr().out) == ["FAIL"] * 3


def test_e4m3_storage_agrees_with_the_library_that_the_budget_does_not_use() -> None:
    x = torch.randn(400, 576, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 40.0  # saturates
    quantised, scale = mla.quantize_e4m3(x, 0.01)
    torch.testing.assert_close(stored(x, E4M3, float(scale)), quantised.double() * float(scale), rtol=0, atol=0)


def test_the_budget_is_twice_the_largest_error_of_the_rounded_run() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 10.0]], dtype=torch.float64)
    rounded = torch.tensor([[3.0, 4.5], [0.0, 10.5]], dtype=torch.float64)
    assert budget(rounded, exact) == pytest.approx(2 * 0.1)


def test_the_configurations_are_those_that_the_output_names() -> None:
    assert [formats.name for formats in CONFIGURATIONS] == NAMES


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": 0}, "tokens is 0; expected at least 1"),
        ({"steps": -1}, "steps is -1; expected at least 1"),
        ({"picture": "no/such/folder/demo.png"}, "expected a file in a folder that exists"),
    ],
)
def test_wrong_options_are_refused_before_any_work(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_demo(**(FEW | {"small": False, "picture": None} | wrong))


def test_plain_progress_says_the_share_that_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(4) as advance:
        for text in ("one", "two", "two", "three"):
            advance(text)
    assert capsys.readouterr().err.splitlines() == ["  0%  one", " 25%  two", " 75%  three"]


def test_plain_progress_speaks_again_when_work_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([100.0, 101.0, 102.5])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(seconds))
    with progress(4) as advance:
        for _ in range(3):
            advance("same")
    assert capsys.readouterr().err.splitlines() == ["  0%  same", " 50%  same"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress(2) as advance:
        advance("one")
        advance("two")
        advance("one more than was announced")
    assert "\x1b[" in terminal.getvalue()
    assert "  0%  one" not in terminal.getvalue()


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    with progress(2) as advance:
        advance("one")
    assert terminal.getvalue() == "  0%  one\n"


def test_importing_mla_loads_no_demo_and_the_demo_loads_no_extras() -> None:
    code = (
        "import sys, mla\n"
        "assert not [name for name in sys.modules if name.startswith('mla.demo')]\n"
        "import mla.demo.run\n"
        "assert not {'matplotlib', 'rich', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
