"""`mla bench` from the outside: a quick run on a CPU, the lists, the pictures, and bad usage."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mla.bench.cases import named_cases
from mla.cli import main


def test_a_quick_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    chosen = "tp8_b1_4k,dp_b64_8k_mtp2,fp8_dp_b128_4k,sparse2k_dp_b64_16k_mtp2,real_tp8_b64"
    command = ["bench", "--quick", "--device", "cpu", "--cases", chosen, "--backends", "reference", "--json", str(file)]
    assert main([*command, "--workspace-mib", "1", "--style", "plain", "--flush", "read"]) == 0
    told = capsys.readouterr()
    assert "scaled down to fit a CPU: no number here says anything about speed" in told.out
    assert "ceilings: copy " in told.out
    assert "tp8_b1_4k: the answer" in told.err
    whole = json.loads(file.read_text())
    assert whole["scaled"]
    assert whole["settings"]["flush"] == "read"
    assert set(whole["about"]) >= {"mla", "torch", "python", "date", "device"}
    assert sorted(whole["cases"]) == sorted(chosen.split(","))
    assert all(case["scaled"] for case in whole["cases"].values())
    assert {(row["contender"], row["verdict"], row["graph_us"]) for row in whole["rows"]} == {
        ("reference", "right", None)
    }
    for row in whole["rows"]:
        assert row["best_us"] == row["eager_us"] > 0
        assert f"{row['case']:25} reference" in told.out
    assert told.out.count("Summary") == 1


def test_a_sweep_of_ones_own_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "sweep.json"
    sizes = ["--batch", "2", "--heads", "4", "--length", "640", "--page-size", "16", "--repetitions", "1"]
    how = ["--quick", "--device", "cpu", "--workspace-mib", "0", "--json", str(file)]
    assert main(["bench", "--sweep", "q_len", *sizes, *how]) == 0
    cases = json.loads(file.read_text())["cases"]
    assert [case["axis_value"] for case in cases.values()] == list(range(1, 9))
    assert {(case["sweep"], case["heads"], case["page_size"]) for case in cases.values()} == {("q_len", 4, 16)}
    capsys.readouterr()
    assert main(["bench", "--plot", str(file), "--to", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'sweep_q_len.png'}\n"


def test_a_described_case_with_a_larger_bound(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--length", "9,70", "--heads", "2", "--dtype", "fp16", "--top-k", "4", "--q-len", "2"]
    how = ["--device", "cpu", "--workspace-mib", "0", "--max-seq-len", "4096", "--repetitions", "1"]
    assert main(["bench", *sizes, *how]) == 0
    assert "own_b2_h2_q2_n70_ragged_fp16_top4 reference" in capsys.readouterr().out


def test_a_backend_that_fails_is_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mla.bench import gate

    nothing_is_right = gate.Judgement("wrong", "planted", 1.0, None)
    monkeypatch.setattr(gate, "judge", lambda *arguments: nothing_is_right)
    how = ["--device", "cpu", "--workspace-mib", "0", "--repetitions", "1"]
    assert main(["bench", "--length", "9", "--heads", "1", *how]) == 1
    assert "wrong  planted" in capsys.readouterr().out


def test_absent_peers_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from mla.bench.peers import Peer

    monkeypatch.setattr(Peer, "module_name", lambda self: None)
    how = ["--device", "cpu", "--workspace-mib", "0", "--repetitions", "1"]
    assert main(["bench", "--length", "9", "--heads", "1", "--peers", "flashmla", *how]) == 0
    told = capsys.readouterr().out
    assert "peers that are not installed: flashmla, flashinfer, sglang, vllm" in told
    assert "not installed: no module flash_mla.flash_mla_interface on the path" in told
    assert main(["bench", "--list", "--style", "plain"]) == 0
    assert capsys.readouterr().out.count("not installed") == 4


def test_the_list_names_every_case_and_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--style", "plain"]) == 0
    told = capsys.readouterr().out
    for name in (*named_cases(), "flashmla", "flashinfer", "sglang", "vllm"):
        assert f"\n{name} " in told


BAD_USAGE = {
    "unknown case": (["--cases", "tp9"], "no case is named 'tp9'; the cases are tp8_b1_4k"),
    "names and sizes": (["--cases", "tp8_b1_4k", "--heads", "2"], "expected no sizes and no --sweep beside it"),
    "ragged sweep": (["--sweep", "q_len", "--ragged"], "expected one --length and no --ragged"),
    "unknown backend": (["--backends", "cublas"], "no backend is named 'cublas'"),
    "unknown peer": (["--peers", "fa4"], "no peer is named 'fa4'"),
    "nobody": (["--backends", "none"], "nobody takes part"),
    "no such function": (["--contender", "mla:nothing"], "has no attribute 'nothing'"),
    "bound too small": (["--cases", "tp8_b1_4k", "--max-seq-len", "5"], "--max-seq-len is 5; the longest request has 4096"),
    "length below Q": (["--length", "3", "--q-len", "4"], "a length is 3; expected at least q_len, 4"),
    "no length": (["--length", "0"], "argument --length: 0 is not positive"),
    "no folder": (["--plot", "a.json", "--to", "no/such"], "'no/such' is no folder"),
    "no record": (["--plot", "no_such.json"], "no_such.json is no record of a run"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", BAD_USAGE)
def test_bad_usage_ends_with_2_and_says_what_is_wrong(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD_USAGE[mistake]
    with pytest.raises(SystemExit) as end:
        main(["bench", "--device", "cpu", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_drawing_is_bad_usage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    how = ["--device", "cpu", "--workspace-mib", "0", "--repetitions", "1", "--json", str(file)]
    assert main(["bench", "--length", "9", "--heads", "1", *how]) == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as end:
        main(["bench", "--plot", str(file), "--to", str(tmp_path)])
    assert end.value.code == 2
    assert "pictures need matplotlib" in capsys.readouterr().err
