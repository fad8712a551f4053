"""`mla backends` says what each backend says, on each device of the machine, and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mla
from mla import registry
from mla.cli.problems import typical_problem


class Picky:
    """Takes sparse calls with pages of 32 on sm_90 only."""

    name = "picky"
    capabilities = mla.Capabilities(compute_capabilities=((9, 0),), dense=False, page_sizes=(32,))

    def why_not(self, problem: mla.Problem) -> list[str]:
        return self.capabilities.refusals(problem)

    def run(self, problem: mla.Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        raise AssertionError("`mla backends` must run nothing")


@pytest.fixture
def other_backends() -> Iterator[None]:
    """Whatever a test registers is forgotten afterwards."""
    before = dict(registry._known())
    yield
    registry._entries.clear()
    registry._entries.update(before)


def rows(told: str) -> list[list[str]]:
    return [line.split(maxsplit=3) for line in told.splitlines()]


def test_on_a_cpu_the_reference_accepts_and_the_kernels_refuse(run: Any) -> None:
    told = run("backends")
    assert "B=1 Q=1 H=128, dense, table width 64, 64 pages of 64, bfloat16 query, bfloat16 cache" in told
    assert "backend='auto' runs: reference" in told
    assert ["reference", "mla", "accepts", "-"] in rows(told)
    assert [row[:3] for row in rows(told)[-2:]] == [["trtllm-gen", "mla", "refused"], ["xqa", "mla", "refused"]]


def test_the_problem_is_the_one_that_is_asked_for(run: Any) -> None:
    sizes = ("--heads", "16", "--q-len", "2", "--page-size", "32", "--top-k", "2048", "--sinks")
    told = run("backends", "--query-dtype", "fp16", "--kv-dtype", "e4m3", *sizes)
    expected = (
        "B=1 Q=2 H=16, sparse top 2048, 128 pages of 32, float16 query, float8_e4m3fn cache, bfloat16 out, with sinks"
    )
    assert expected in told


def test_the_problem_holds_no_memory() -> None:
    sizes = {"heads": 128, "q_len": 4, "page_size": 1, "top_k": 0, "sinks": True}
    problem = typical_problem(query_dtype="bf16", kv_dtype="bf16", **sizes)  # type: ignore[arg-type]
    assert problem.kv_cache.device.type == problem.query.device.type == "meta"


def test_each_device_has_a_table_of_its_own(run: Any, gpus: Any, other_backends: None) -> None:
    gpus((9, 0), (12, 0))
    mla.register_backend("picky", Picky())
    cpu, hopper, blackwell = run("backends", "--top-k", "64", "--page-size", "32").split("\n\n")
    assert "on cpu\n" in cpu
    assert "on cuda:0 (sm_90)\n" in hopper
    assert "on cuda:1 (sm_120)\n" in blackwell
    assert ["picky", "registered", "accepts", "-"] in rows(hopper)
    assert "the device is sm_120; it runs on sm_90" in blackwell
    assert "the device is no NVIDIA GPU; it runs on sm_90" in cpu


def test_every_reason_is_told(run: Any, other_backends: None) -> None:
    mla.register_backend("picky", Picky())
    (row,) = (row for row in rows(run("backends")) if row[0] == "picky")
    assert row[2] == "refused"
    assert row[3] == (
        "the device is no NVIDIA GPU; it runs on sm_90; the call is dense (sparse_mla_top_k=0); it does sparse only; "
        "the page size is 64; it takes 32"
    )


def test_a_device_that_fails_is_a_table_too(run: Any, gpus: Any) -> None:
    gpus(RuntimeError("uncorrectable ECC error"))
    cpu, failed = run("backends").split("\n\n")
    assert "accepts" in cpu
    assert failed.startswith("cuda:0: not usable")
    assert "failed: RuntimeError: uncorrectable ECC error" in failed


def test_a_broken_backend_is_a_row_and_not_told_twice(
    run: Any, other_backends: None, capsys: pytest.CaptureFixture[str]
) -> None:
    mla.register_backend("lost", "no_such_module:backend")
    told = run("backends")
    assert ["lost", "registered", "broken"] in [row[:3] for row in rows(told)]
    assert "No module named 'no_such_module'" in told
    assert capsys.readouterr().err == ""


def test_a_warning_that_no_row_tells_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, other_backends: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from mla import plugins
    from mla.cli import main

    def discover(built_in: Any) -> list[plugins.Found]:
        plugins.warn("backend 'twin' is offered twice")
        return []

    registry._entries.clear()
    monkeypatch.setattr(plugins, "discover", discover)
    assert main(["backends"]) == 0
    assert capsys.readouterr().err == "warning: backend 'twin' is offered twice\n"
