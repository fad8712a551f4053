"""Who knows only PyTorch gets a right answer from `docs/start.md`: its commands and its Python, nothing else, in a new
environment. By default PyTorch is the one that is here; MLA_TEST_DOWNLOADS=1 begins with nothing and downloads all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BLOCK = re.compile(
    r"^(?P<unrun><!-- not run: it needs a GPU -->\n)?```(?P<language>bash|python)\n(?P<text>.*?)^```$", re.M | re.S
)
ANSWER = [
    "(2, 1, 16, 512) [127.0, 64.5]",  # the means of 125 ... 129 and of 0 ... 129
    "True 130",
    (
        "block_tables[1, 2] is page 9; expected 0 <= page < 4, the pages of kv_cache "
        "(row 1 has length 130, so its first 3 columns count)"
    ),
]
ANSWER_OF_A_GPU = "[127.5, 65.0]"  # one token more, 130, in a captured graph

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


def blocks(root: Path, language: str, *, gpu: bool = False) -> list[str]:
    found = BLOCK.finditer((root / "docs" / "start.md").read_text())
    return [one["text"] for one in found if one["language"] == language and (gpu or one["unrun"] is None)]


@pytest.fixture
def folder(built: Any, tmp_path: Path) -> Path:
    """What a reader has: the unpacked sources, in a folder with nothing else."""
    shutil.unpack_archive(built.sdist, tmp_path)
    (unpacked,) = tmp_path.iterdir()
    return unpacked


def follow(folder: Path, command: Callable[..., Any], commands: list[str], **changes: str) -> str:
    """Type the commands into one shell; what they printed."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    told = command(
        "bash", "-euo", "pipefail", "-c", "\n".join(commands), cwd=folder, seconds=1500, PATH=path, **changes
    )
    return str(told.stdout)


def paste(folder: Path, given: list[str]) -> tuple[list[str], str]:
    """Paste the blocks into the environment's Python, which reads them as from a keyboard: (the answers, its stderr)."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    typed = "".join(f"{text}\n" for text in given)  # and Enter behind each
    done = subprocess.run(
        ["bash", "-c", ". .venv/bin/activate && python -q -i"],
        cwd=folder, env=kept | {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}, input=typed, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return answers(done.stdout), done.stderr


def answers(told: str) -> list[str]:
    """Without the tensor that a keyboard's Python shows when a call gives one."""
    return [line for line in told.splitlines() if not re.match(r" |tensor\(|$", line)]


def test_the_page_leads_to_a_right_answer(folder: Path, root: Path, command: Any) -> None:
    lines = "".join(blocks(root, "bash")).splitlines()
    assert lines[0] == "python3 -m venv .venv"
    seen = "\n".join(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    (folder.parent / "the_running_one.pth").write_text(seen)
    # PyTorch and setuptools are those that are here: the setuptools that some Pythons put into an environment is too old.
    lines[1:1] = [
        "cp ../the_running_one.pth .venv/lib/python3*/site-packages",
        "rm -rf .venv/lib/python3*/site-packages/{setuptools*,_distutils_hack,distutils-precedence.pth}",
    ]
    told = follow(folder, command, lines, PIP_NO_BUILD_ISOLATION="0")
    assert re.search(r"^mla +\d", told, re.M), "`mla env` is the last line"
    assert paste(folder, blocks(root, "python"))[0] == ANSWER

    (folder / "start.py").write_text("".join(blocks(root, "python")))
    told = follow(folder, command, [". .venv/bin/activate", "python start.py"])
    assert told.splitlines() == ANSWER


@pytest.mark.downloads
@pytest.mark.skipif(os.environ.get("MLA_TEST_DOWNLOADS") != "1", reason="downloads PyTorch: set MLA_TEST_DOWNLOADS=1")
def test_the_page_leads_from_an_empty_machine_to_a_right_answer(
    folder: Path, root: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.perf_counter()
    follow(folder, command, blocks(root, "bash"), PIP_NO_INDEX="0")
    installed = time.perf_counter()
    told, errors = paste(folder, blocks(root, "python"))
    assert told == ANSWER
    assert not re.search("Warning(?!: Failed to initialize NumPy)|Error", errors), errors
    with capsys.disabled():
        print(f"\ninstalled in {installed - start:.0f} s, right answers after {time.perf_counter() - start:.0f} s")


@pytest.mark.gpu
def test_on_a_gpu_no_block_is_left_out(root: Path, source_tree: Path, bare_python: Path, command: Any) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    program = "".join(blocks(root, "python", gpu=True))
    told = command(bare_python, "-c", program, cwd=source_tree).stdout.splitlines()
    assert [line for line in told if line in ANSWER] == ANSWER
    assert told[-2] == ANSWER_OF_A_GPU
