"""The loop: per case the tensors and the answer, then per contender: prepare, judge, time, and judge again."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from mla.bench import ceilings, gate
from mla.bench.cases import BenchCase
from mla.bench.contenders import Contender, Unable, Way
from mla.bench.floors import Ceilings
from mla.bench.inputs import Inputs, make
from mla.bench.results import Row, beside_best_peer
from mla.bench.timing import Timer

QUICK_LOOK = 7  # repetitions when a contender has several ways

Advance = Callable[[str], None]


class DeviceLost(Exception):
    """A contender took the GPU down with it: this process can run nothing more."""


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        max_seq_len: the bound that every call gets; None is each case's longest length.
        clean_flush: as `Timer.clean`.
    """

    cases: Sequence[BenchCase]
    contenders: Sequence[Contender]
    device: torch.device
    repetitions: int
    seed: int = 0
    max_seq_len: int | None = None
    clean_flush: bool = False

    @property
    def pieces(self) -> int:
        """How often `advance` is called: the ceilings, and per case the answer and each contender."""
        return 1 + len(self.cases) * (1 + len(self.contenders))


class Bench:
    """A run of a plan on its device."""

    def __init__(self, plan: Plan, advance: Advance) -> None:
        self.plan, self.advance = plan, advance
        self.timer = Timer(plan.device, plan.repetitions, clean=plan.clean_flush)
        advance("the device's own rates")
        self.ceilings: Ceilings = ceilings.measure(self.timer)

    def __iter__(self) -> Iterator[tuple[BenchCase, list[Row]]]:
        """Each case with its rows, as they come.

        Raises:
            DeviceLost: after the rows of the case that did it.
        """
        for case in self.plan.cases:
            rows: list[Row] = []
            lost = self._run_case(case, rows)
            yield case, beside_best_peer(rows)
            if lost:
                raise DeviceLost(lost)
            self._free()

    def _run_case(self, case: BenchCase, rows: list[Row]) -> str:
        """Fill in the rows of a case; return why no other case can follow, or ""."""
        self.advance(f"{case.name}: the answer")
        try:
            inputs = make(case, self.plan.device, self.plan.seed, self.plan.max_seq_len)
            right = gate.answer(inputs)
        except torch.OutOfMemoryError as error:
            reason = f"the case does not fit into the device's memory: {_first_line(error)}"
            rows += [Row(case.name, one.name, one.kind, "failed", reason) for one in self.plan.contenders]
            return ""
        for contender in self.plan.contenders:
            self.advance(f"{case.name}: {contender.name}")
            row = Row(case.name, contender.name, contender.kind, "failed")
            try:
                row = self._run_one(contender, inputs, right, row)
                self.timer.wait()
            except Unable as reason:
                row = replace(row, verdict="unable", reason=str(reason))
            except Exception as error:  # a contender may raise anything; it is told in its row
                row = replace(row, reason=f"{type(error).__name__}: {_first_line(error)}")
            rows.append(row.timed(case, self.ceilings))
            try:
                self.timer.wait()
                self._free()
            except Exception as error:
                return f"{contender.name} on {case.name} lost the device: {_first_line(error)}"
        return ""

    def _run_one(self, contender: Contender, inputs: Inputs, right: gate.Answer, row: Row) -> Row:
        must_hold = contender.kind == "backend"
        passed: list[tuple[Way, gate.Judgement]] = []
        for way in contender.prepare(inputs):
            self._poison_free_memory(right)
            judgement = gate.judge(way.run(), right, must_hold)
            if judgement.verdict == "wrong":
                return _judged(row, way, judgement)
            passed.append((way, judgement))
        if len(passed) > 1:
            way, judgement = min(passed, key=lambda one: self.timer.median_us(one[0].run, QUICK_LOOK))
        else:
            way, judgement = passed[0]
        row = _judged(row, way, judgement)
        timed = replace(row, eager_us=self.timer.median_us(way.run), host_us=self.timer.host_us(way.run))
        again = gate.judge(way.run(), right, must_hold)
        if again.verdict == "wrong":
            return _judged(row, way, again, "after many calls: ")
        return self._with_graph(contender, way, right, row, timed)

    def _with_graph(self, contender: Contender, way: Way, right: gate.Answer, row: Row, timed: Row) -> Row:
        """The timed row with the graph's time, or without and with the reason; `row`, marked, if a replay is wrong."""
        if not self.timer.on_gpu or not contender.graphs:
            reason = "it cannot be captured" if self.timer.on_gpu else "a CPU has no graphs"
            return replace(timed, graph_reason=reason)
        try:
            captured = self.timer.capture(way.run)
        except Exception as error:  # a call that waits for the device, say
            self.timer.wait()
            return replace(timed, graph_reason=f"{type(error).__name__}: {_first_line(error)}")
        graph_us = self.timer.median_us(captured.replay)
        captured.out.fill_(math.nan)
        captured.replay()
        judgement = gate.judge(captured.out, right, contender.kind == "backend")
        if judgement.verdict == "wrong":
            return _judged(row, way, judgement, "replayed as a graph: ")
        return replace(timed, graph_us=graph_us)

    def _poison_free_memory(self, right: gate.Answer) -> None:
        """What the allocator hands out next holds NaN: no contender passes with the output of the one before it."""
        kept = [torch.full(right.out.shape, math.nan, dtype=torch.bfloat16, device=right.out.device) for _ in range(4)]
        del kept

    def _free(self) -> None:
        gc.collect()
        if self.timer.on_gpu:
            with suppress(RuntimeError):  # after a capture that failed half-way the cache may stay full
                torch.cuda.empty_cache()


def _judged(row: Row, way: Way, judgement: gate.Judgement, when: str = "") -> Row:
    return replace(
        row,
        way=way.label,
        verdict=judgement.verdict,
        reason=f"{when}{judgement.reason}" if judgement.reason else "",
        within_budget=judgement.within_budget,
        relative_error=judgement.relative_error,
        error_over_budget=judgement.error_over_budget,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
