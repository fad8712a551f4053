"""Every command that the pages show is run by a test, here or elsewhere, or is at least one that exists."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mla.cli import parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))

RUN_ELSEWHERE = {"python -m pip install --editable .": "tests/package/test_installs.py"}
"""Commands in ```bash blocks that are not run here -> the test that runs them."""

AS_PROGRAM = re.compile(r"^(?:python -m )?mla (?P<words>.*)$")
INLINE = re.compile(r"`((?:make|mla|python -m) [^`]+)`")


def blocks(language: str) -> dict[str, list[str]]:
    """Page -> the commands in its blocks of that language."""
    found = {}
    for page in PAGES:
        shown = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)
        found[page.name] = [line for block in shown for line in block.splitlines() if line.strip()]
    return found


BASH = sorted({command for commands in blocks("bash").values() for command in commands})
CONSOLE = sorted({command for commands in blocks("console").values() for command in commands})
INSIDE_TEXT = sorted({command for page in PAGES for command in INLINE.findall(page.read_text())})


@pytest.mark.parametrize("command", BASH)
def test_a_command_in_a_bash_block_works(command: str) -> None:
    if command in RUN_ELSEWHERE:
        assert (ROOT / RUN_ELSEWHERE[command]).exists()
        return
    program, *words = shlex.split(command)
    assert program == "python", "say here which test runs it"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", sorted({*CONSOLE, *INSIDE_TEXT}))
def test_a_command_that_is_named_exists(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif match := AS_PROGRAM.match(" ".join(map(shlex.quote, words))):
        given = shlex.split(match["words"])
        if "NAME" in command or len(given) == 1:  # named, not spelled out: `mla check`
            assert given[0] in parser().format_help()
        else:
            parser().parse_args(given)  # exits with status 2 at the first word that it does not know
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None
    else:
        assert words[:3] == ["pytest", "-p", "mla.testing.pytest_plugin"]
        assert importlib.util.find_spec(words[2]) is not None


def test_there_are_commands_to_look_at() -> None:
    assert len(BASH) >= 4
    assert any(command.startswith("mla check") for command in CONSOLE)
