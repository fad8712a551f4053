"""`mla check` and `pytest --mla-kernel` on kernels that lie in the current folder."""

from __future__ import annotations

import json
import sys

import pytest

from mla.cli import main

pytest_plugins = ["pytester"]

KERNELS = """
from mla.testing import Kernel, Profile

class TopAligned(Kernel):
    def visible(self, p, b, t):
        return min(t + 1, int(p.seq_lens[b]))

good = Kernel()
wrong = TopAligned()
dense_only = Profile(sparse=False)
number = 7
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "someones_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("someones_kernels", None)


def test_the_public_call_on_the_reference_passes(folder, capsys):
    target = "mla:trtllm_batch_decode_with_kv_cache_mla"
    assert main(["check", target, "--backend", "reference", "--examples", "20"]) == 0
    assert "0 fail" in capsys.readouterr().out


def test_a_broken_kernel_ends_with_status_one_and_the_kind(folder, capsys):
    assert main(["check", "someones_kernels:wrong", "--only", "mask", "--json", "r.json", "--html", "r.html"]) == 1
    out = capsys.readouterr().out
    assert "FAIL mask" in out
    assert "numbers are further off than any rounding explains" in out
    assert json.loads((folder / "r.json").read_text())["passed"] is False
    assert "<h1>someones_kernels:wrong on cpu</h1>" in (folder / "r.html").read_text()


def test_a_profile_can_be_named(folder, capsys):
    assert (
        main(
            [
                "check",
                "someones_kernels:good",
                "--profile",
                "someones_kernels:dense_only",
                "--only",
                "sparse lists",
                "--only",
                "mask",
            ]
        )
        == 0
    )
    assert "not claimed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["someones_kernels"], "expected 'module:attr'"),
        (["someones_kernels:nothing"], "has no attribute 'nothing'"),
        (["no_such_module_anywhere:f"], "No module named"),
        (["someones_kernels:number"], "expected a function"),
        (["someones_kernels:good", "--profile", "someones_kernels:number"], "expected a mla.testing.Profile"),
        (["someones_kernels:good", "--only", "masks"], "property is 'masks'"),
        (["someones_kernels:good", "--backend", "cutlass"], "backend is 'cutlass'"),
        (["someones_kernels:good", "--json", "no/such/folder/r.json"], "no folder that exists"),
    ],
)
def test_bad_usage_ends_with_status_two_and_a_message(folder, capsys, arguments, text):
    with pytest.raises(SystemExit) as stopped:
        main(["check", *arguments])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_pytest_runs_the_suite_on_a_named_kernel(folder, pytester):
    pytester.makepyfile(someones_kernels=KERNELS)
    options = ("-p", "mla.testing.pytest_plugin", "-p", "no:cacheprovider", "-q")
    good = pytester.runpytest_inprocess(*options, "--mla-kernel", "someones_kernels:good", "-k", "mask or sinks or far")
    counts = good.parseoutcomes()
    assert counts["passed"] > 20
    assert counts["skipped"] == 4  # the far pages need a GPU
    assert "failed" not in counts
    wrong = pytester.runpytest_inprocess(
        *options,
        "--mla-kernel",
        "someones_kernels:wrong",
        "--mla-profile",
        "someones_kernels:dense_only",
        "-k",
        "mask or sparse",
    )
    assert wrong.ret == 1
    assert wrong.parseoutcomes()["failed"] > 5
    assert wrong.parseoutcomes()["skipped"] >= 16


def test_the_plug_in_does_nothing_without_its_option(pytester):
    pytester.makepyfile("def test_one(): pass")
    pytester.runpytest_inprocess("-p", "mla.testing.pytest_plugin").assert_outcomes(passed=1)
