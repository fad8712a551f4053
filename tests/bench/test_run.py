"""The loop: who is right is timed, who is not gets a reason, and one contender's trouble is no other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla.bench import gate
from mla.bench.cases import BenchCase, own_case, scaled_down
from mla.bench.contenders import Contender, Unable, Way, backend, default_backends, in_order, own
from mla.bench.inputs import Inputs
from mla.bench.results import Row
from mla.bench.run import Bench, DeviceLost, Plan

CPU = torch.device("cpu")
CASE = BenchCase("tiny", (40, 7), heads=2)


def rows_of(*contenders: Contender, cases: tuple[BenchCase, ...] = (CASE,)) -> dict[str, Row]:
    told: list[str] = []
    plan = Plan(cases, contenders, CPU, repetitions=2)
    rows = {row.contender: row for _, rows in Bench(plan, told.append) for row in rows}
    assert len(told) == plan.pieces
    return rows


def test_one_wrong_contender_gets_a_reason_and_no_time_and_the_others_are_timed(contender: Any) -> None:
    rows = rows_of(
        contender("peer", "peer"),
        contender("planted", "backend", lambda out: out.roll(1, 0)),
        contender("honest", "backend"),
    )
    planted = rows["planted"]
    assert planted.verdict == "wrong"
    assert "relative error" in planted.reason
    assert planted.relative_error > 1
    times = (planted.eager_us, planted.graph_us, planted.host_us, planted.best_us, planted.ratio_to_floor, planted.gbs)
    assert set(times) == {None}
    honest = rows["honest"]
    assert (honest.verdict, honest.within_budget, honest.graph_us, honest.host_us) == ("right", True, None, None)
    assert honest.graph_reason == "a CPU has no graphs"
    assert honest.best_us == honest.eager_us > 0
    assert honest.ratio_to_floor == pytest.approx(honest.best_us / honest.floor_us)
    assert honest.tflops == pytest.approx(honest.flops / honest.best_us / 1e6)
    assert honest.ratio_to_best_peer == pytest.approx(honest.best_us / rows["peer"].best_us)
    assert rows["peer"].ratio_to_best_peer == 1


def test_a_peer_outside_the_budget_is_timed_and_marked_and_a_backend_is_not(contender: Any) -> None:
    rows = rows_of(
        contender("peer", "peer", lambda out: 1.03 * out), contender("ours", "backend", lambda out: 1.03 * out)
    )
    assert (rows["peer"].verdict, rows["peer"].within_budget) == ("near", False)
    assert rows["peer"].best_us is not None
    assert (rows["ours"].verdict, rows["ours"].best_us) == ("wrong", None)


def test_a_contender_that_writes_nothing_cannot_pass_with_what_others_left(contender: Any) -> None:
    idle = Contender("idle", "backend", lambda i: [Way(lambda: torch.empty(2, 1, 2, 512, dtype=torch.bfloat16))])
    assert rows_of(contender("honest", "backend"), idle)["idle"].verdict == "wrong"


def test_a_contender_that_turns_wrong_with_use_is_found_out(contender: Any) -> None:
    calls = 0

    def tire(out: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return out if calls == 1 else 2 * out

    row = rows_of(contender("tired", "backend", tire))["tired"]
    assert (row.verdict, row.eager_us) == ("wrong", None)
    assert row.reason.startswith("after many calls: the relative error")


def test_refusing_raising_and_absent_contenders_are_rows(contender: Any) -> None:
    def refuse(inputs: Inputs) -> list[Way]:
        raise Unable("it is a Sunday")

    def explode(out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of luck\nand more")

    rows = rows_of(Contender("lazy", "peer", refuse), contender("bad", "own", explode), contender("good", "backend"))
    assert (rows["lazy"].verdict, rows["lazy"].reason) == ("unable", "it is a Sunday")
    assert (rows["bad"].verdict, rows["bad"].reason) == ("failed", "RuntimeError: out of luck")
    assert rows["good"].verdict == "right"
    assert rows["good"].ratio_to_best_peer is None


def test_the_quickest_way_counts_and_every_way_is_judged() -> None:
    def ways(wrong: bool) -> Callable[[Inputs], list[Way]]:
        def prepare(inputs: Inputs) -> list[Way]:
            out = gate.answer(inputs).out.to(torch.bfloat16)

            def slow() -> torch.Tensor:
                for _ in range(50):
                    out.float().sum()
                return out

            spoiled = torch.zeros_like(out)
            return [Way(slow, "1 split"), Way(lambda: out, "2 splits"), Way(lambda: spoiled if wrong else out, "3")]

        return prepare

    rows = rows_of(Contender("right", "peer", ways(False)), Contender("wrong", "peer", ways(True)))
    assert rows["right"].way in ("2 splits", "3")
    assert (rows["wrong"].verdict, rows["wrong"].way) == ("wrong", "3")


def test_after_a_lost_device_nothing_is_run_and_the_rows_so_far_are_there(
    contender: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(Plan((CASE, CASE), (contender("killer", "backend"),), CPU, 1), lambda text: None)

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(bench.timer, "wait", lost)
    seen = iter(bench)
    _, rows = next(seen)
    assert rows[0].verdict == "failed"
    with pytest.raises(DeviceLost, match="killer on tiny lost the device: CUDA error: an illegal memory access"):
        next(seen)


def test_a_case_that_does_not_fit_is_told_and_the_next_one_runs(
    contender: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mla.bench import run

    def make(case: BenchCase, *args: Any) -> Inputs:
        if case.name == "huge":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(case, *args)

    made = run.make
    monkeypatch.setattr(run, "make", make)
    plan = Plan((BenchCase("huge", (9,), heads=1), CASE), (contender("any", "backend"),), CPU, 1)
    (_, first), (_, second) = Bench(plan, lambda text: None)
    assert first[0].verdict == "failed"
    assert "does not fit into the device's memory: CUDA out of memory" in first[0].reason
    assert second[0].verdict == "right"


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("top_k", [0, 512])
def test_a_backend_goes_through_the_public_call(dtype: str, top_k: int) -> None:
    case = scaled_down(own_case((2048,), batch=64, heads=32, q_len=2, dtype=dtype, top_k=top_k))
    row = rows_of(backend("reference", workspace_bytes=0), cases=(case,))["reference"]
    assert (row.verdict, row.kind) == ("right", "backend")


def test_a_backend_that_refuses_says_why() -> None:
    row = rows_of(backend("xqa", workspace_bytes=16))["xqa"]
    assert row.verdict == "unable"
    assert row.reason


def test_a_function_that_somebody_names_takes_part() -> None:
    row = rows_of(own("mla:trtllm_batch_decode_with_kv_cache_mla", workspace_bytes=0)).popitem()[1]
    assert (row.verdict, row.kind) == ("right", "own")


def test_unknown_backends_are_refused_and_peers_come_first(contender: Any) -> None:
    with pytest.raises(ValueError, match="no backend is named 'cublas'; the backends are reference, trtllm-gen, xqa"):
        backend("cublas")
    assert default_backends(CPU) == ["reference"]
    assert "reference" not in default_backends(torch.device("cuda"))
    order = in_order([contender("a", "backend"), contender("b", "peer"), contender("c", "own"), contender("d", "peer")])
    assert [one.name for one in order] == ["b", "d", "a", "c"]
