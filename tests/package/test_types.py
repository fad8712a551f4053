"""What a caller's type checker sees: the public names, typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CALLER = """
import torch

import mla
from mla.testing import Case, Profile, assert_close, build

names: list[str] = [info.name for info in mla.backends().values()]
call = build(Case(lengths=(3,)))
result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = mla.trtllm_batch_decode_with_kv_cache_mla(**call.arguments)
assert_close(result, call.problem)
chosen: str | None = mla.explain(**call.arguments).backend
profile: Profile = Profile(sparse=False)


class Mine:
    name = "mine"

    def why_not(self, problem: mla.Problem) -> list[str]:
        return [] if problem.page_size == 64 else ["the page size is not 64"]

    def run(self, problem: mla.Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        out.zero_()


mla.register_backend("mine", Mine())
out, lse = mla.merge_state(call.problem.query, call.problem.query, call.problem.query, call.problem.query)
wrong: int = mla.quantize_e4m3(out)[0]  # the one error
"""


def test_a_strictly_typed_caller_passes_and_a_wrong_type_is_seen(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    run = subprocess.run(
        [sys.executable, "-m", "mypy", tmp_path / "caller.py"],  # strict, as pyproject.toml says
        cwd=Path(__file__).parents[2],  # what `make lint` found out about torch is in the cache here
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = run.stdout.splitlines()
    assert len([line for line in lines if ": error: " in line]) == 1, run.stdout + run.stderr
    assert 'expression has type "Tensor", variable has type "int"' in run.stdout
