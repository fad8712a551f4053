"""The command line as a whole: versions, bad usage, and what it leaves unloaded."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import mla
from mla.cli import COMMANDS, main, parser


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"mla {mla.__version__}\n"


def test_the_module_ends_with_the_status_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mla", "env"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("mla", run_name="__main__")
    assert end.value.code == 0
    assert mla.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: mla {command}" in capsys.readouterr().out
    assert command in parser().format_help()


BAD_USAGE = {
    "no command": ([], "required: COMMAND"),
    "unknown command": (["race"], "invalid choice: 'race'"),
    "unknown option": (["env", "--fast"], "unrecognized arguments: --fast"),
    "unknown dtype": (["backends", "--query-dtype", "int8"], "argument --query-dtype: invalid choice: 'int8'"),
    "heads not a number": (["backends", "--heads", "many"], "argument --heads: invalid positive value: 'many'"),
    "no heads": (["backends", "--heads", "0"], "argument --heads: 0 is not positive"),
    "negative top-k": (["backends", "--top-k", "-1"], "argument --top-k: -1 is negative"),
    "no legal call": (
        ["backends", "--query-dtype", "fp16", "--kv-dtype", "bf16"],
        "no legal call: query has dtype float16 and kv_cache bfloat16",
    ),
    "no such device": (["demo", "--device", "abacus"], "argument --device: 'abacus' cannot be used here"),
    "a device without numbers": (["demo", "--device", "meta"], "argument --device: 'meta' cannot be used here"),
    "no such folder": (
        ["demo", "--picture", "no/such/folder/a.png"],
        "'no/such/folder/a.png' is in no folder that exists",
    ),
    "no steps": (["demo", "--steps", "0"], "argument --steps: 0 is not positive"),
}


@pytest.mark.parametrize("mistake", BAD_USAGE)
def test_bad_usage_ends_with_2_and_says_what_is_wrong(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD_USAGE[mistake]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    told = capsys.readouterr()
    assert end.value.code == 2
    assert message in told.err
    assert told.err.startswith("usage: mla")
    assert told.out == ""


def test_a_reader_that_leaves_early_is_no_error_message(tmp_path: Path) -> None:
    import_path = os.pathsep.join(filter(None, [str(Path(mla.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-m", "mla", "backends"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": import_path},
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()
    assert not re.search("Traceback|BrokenPipe", told), told
    assert process.returncode == 1
