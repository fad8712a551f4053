"""The tests in `interpreted/` pass. Each file is a process of its own, since Triton reads TRITON_INTERPRET once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "interpreted").glob("test_*.py"))
NOT_INHERITED = ("PYTEST", "COV_", "COVERAGE")
UNMEASURED = {"test_oracle_a.py", "test_oracle_b.py"}
"""Coverage would double their time, and they run no line of a kernel that the other files do not."""


@pytest.mark.parametrize("file", FILES)
def test_the_file_passes(file: str, request: pytest.FixtureRequest) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", f"pythonpath={request.config.rootpath}"]
    if not request.config.getini("pythonpath"):
        options[-1] = "pythonpath="  # the tests run against what is installed
    if request.config.pluginmanager.hasplugin("_cov") and file not in UNMEASURED:
        # pytest-cov adds whatever lies beside its own data file in the end, under this pattern of names.
        data = os.environ.get("COVERAGE_FILE", ".coverage")
        environment["COVERAGE_FILE"] = str(Path(f"{data}.interpreted-{Path(file).stem}").absolute())
        options += ["--cov", "--cov-report=", "--cov-fail-under=0"]
    else:
        options += ["-p", "no:cov"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(HERE / "interpreted" / file)],
        cwd=request.config.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-20000:]}\n{run.stderr[-5000:]}"
    assert " passed" in run.stdout


def test_without_the_variable_the_repair_says_that_the_interpreter_is_off() -> None:
    from mla.backends.trtllm_gen import interpreter

    assert not interpreter.active()
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before Triton is imported"):
        interpreter.repair()
