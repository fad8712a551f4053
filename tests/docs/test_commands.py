"""Every command that the pages show is run by a test, here or elsewhere, and is spelled as the programs know it."""

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

CHECK, BENCH, XQA = "tests/testing/test_check.py", "tests/bench/test_command.py", "tests/xqa/test_aot.py"
RUN_ELSEWHERE = {
    "make bench": f"{BENCH}::test_a_quick_run_on_a_cpu",
    "make demo": "tests/demo/test_run.py::test_the_small_demo_passes_and_says_what_ran_how_wrong_it_was_and_what_it_cost",
    "make lint": "tests/package/test_arrows.py::test_every_contract_is_kept",
    "mla backends --markdown": "tests/package/test_readme.py::test_the_table_of_backends_is_the_generated_one",
    "mla bench --cases 'tp8_*' --peers all --json a.json": f"{BENCH}::test_a_quick_run_on_a_cpu",
    "mla bench --flush read": f"{BENCH}::test_a_quick_run_on_a_cpu",
    "mla bench --plot a.json b.json --to docs": f"{BENCH}::test_a_sweep_of_ones_own_and_its_picture",
    "mla bench --sweep length --json b.json": f"{BENCH}::test_a_sweep_of_ones_own_and_its_picture",
    "mla check": f"{CHECK}::test_the_public_call_on_the_reference_passes",
    "mla check mla:trtllm_batch_decode_with_kv_cache_mla --backend reference": (
        f"{CHECK}::test_the_public_call_on_the_reference_passes"
    ),
    "mla check my_module:my_kernel": f"{CHECK}::test_a_profile_can_be_named",
    "mla check my_module:my_kernel --json report.json --html report.html": (
        f"{CHECK}::test_a_broken_kernel_ends_with_status_one_and_the_kind"
    ),
    "pytest -p mla.testing.pytest_plugin --mla-kernel my_module:my_kernel": (
        f"{CHECK}::test_pytest_runs_the_suite_on_a_named_kernel"
    ),
    "python -m mla.backends.trtllm_gen.machine_code docs/aot_trtllm_gen.md": (
        "tests/trtllm_gen/test_machine_code.py::test_the_page_has_a_row_for_each_configuration_and_chip"
    ),
    "python -m mla.backends.xqa.aot": f"{XQA}::test_the_page_has_a_row_for_each_record",
    "python -m mla.testing.faults.matrix": "tests/testing/test_kill_matrix.py::test_a_page_is_made_of_rows",
    "python -m mla.testing.summary": "tests/testing/test_summary.py::test_the_page_is_the_committed_reports",
    "python -m mla.testing.tightness": (
        "tests/testing/test_emulations.py"
        "::test_two_thousand_problems_and_every_honest_way_pass_and_the_budget_is_tight_enough_to_see"
    ),
}
"""What is not run here -> the test that runs it, some with fewer cases."""

NEEDS_A_GPU = {"mla check my_module:my_kernel --device cuda"}
FOLLOWED = {"start.md": "tests/package/test_five_minutes.py"}
"""Pages whose blocks a test follows to the letter."""

AS_PROGRAM = re.compile(r"^(?:python -m )?mla (?P<words>.*)$")
INLINE = re.compile(r"`((?:make|mla|python -m) [^`]+)`")


def blocks(language: str) -> dict[str, list[str]]:
    """Page -> the commands in its blocks of that language."""
    found = {}
    for page in PAGES:
        shown = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)
        lines = (re.sub(r"\s+#.*", "", line) for block in shown for line in block.splitlines())
        found[page.name] = [line for line in lines if line]
    return found


BASH = sorted({command for page, shown in blocks("bash").items() if page not in FOLLOWED for command in shown})
CONSOLE = sorted({command for shown in blocks("console").values() for command in shown})
INSIDE_TEXT = sorted({command for page in PAGES for command in INLINE.findall(page.read_text())})


def test_every_command_that_is_not_run_here_is_run_elsewhere() -> None:
    shown = {*CONSOLE, *INSIDE_TEXT} - {*BASH}
    assert shown == {*RUN_ELSEWHERE, *NEEDS_A_GPU}
    for place in RUN_ELSEWHERE.values():
        file, _, function = place.partition("::")
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.M), place
    for page, file in FOLLOWED.items():
        assert f'"docs" / "{page}"' in (ROOT / file).read_text()


@pytest.mark.parametrize("command", BASH)
def test_a_command_in_a_bash_block_works(command: str) -> None:
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
    words = shlex.split(command)
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
    assert len(BASH) >= 3
    assert any(command.startswith("mla check") for command in CONSOLE)
