"""What a CPU cannot show: graphs, events, and a call that cannot be captured."""

from __future__ import annotations

import pytest
import torch

from mla.bench.cases import BenchCase
from mla.bench.contenders import Contender, Way, backend
from mla.bench.gate import answer
from mla.bench.inputs import Inputs
from mla.bench.run import Bench, Plan
from mla.bench.timing import Timer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]


def exact_copies(waits: bool, writes: bool = True) -> Contender:
    def prepare(inputs: Inputs) -> list[Way]:
        exact = answer(inputs).out.to(torch.bfloat16)
        out = exact.clone()

        def run() -> torch.Tensor:
            if waits:
                out[0, 0, 0, 0].item()
            return out.copy_(exact) if writes else out

        return [Way(run)]

    return Contender(f"waits={waits} writes={writes}", "own", prepare)


def test_a_call_is_timed_in_both_ways_and_one_that_waits_only_without_a_graph() -> None:
    cases = (BenchCase("small", (70, 5), heads=4, q_len=2), BenchCase("next", (64,), heads=4))
    contenders = (exact_copies(True), exact_copies(False), exact_copies(False, writes=False), backend("reference"))
    plan = Plan(cases, contenders, torch.device("cuda", torch.cuda.current_device()), repetitions=5)
    bench = Bench(plan, lambda text: None)
    assert 0 < bench.ceilings.empty_graph_us < 1e3
    assert bench.timer.flush_bytes >= 256 << 20
    for _, (waits, good, stale, reference) in bench:
        assert (waits.verdict, waits.graph_us) == ("right", None)
        assert waits.eager_us > 0
        assert waits.graph_reason
        assert good.verdict == "right", good.reason
        assert min(good.eager_us, good.graph_us, good.host_us) > 0
        assert (stale.verdict, stale.best_us) == ("wrong", None)
        assert stale.reason.startswith("replayed as a graph: ")
        assert (reference.verdict, reference.graph_reason) == ("right", "it cannot be captured")


@pytest.mark.parametrize("clean", [False, True])
def test_a_flush_writes_unless_it_is_to_be_clean(clean: bool) -> None:
    timer = Timer(torch.device("cuda", torch.cuda.current_device()), 2, clean=clean)
    timer._filler.fill_(1)
    timer.median_us(lambda: None)
    assert bool(timer._filler.all()) == clean


def test_a_longer_kernel_takes_longer() -> None:
    timer = Timer(torch.device("cuda", torch.cuda.current_device()), 20)
    small, large = (torch.zeros(size, device="cuda") for size in (1 << 10, 1 << 28))
    short, long = (timer.median_us(timer.capture(lambda x=x: x.add_(1)).replay) for x in (small, large))
    assert short < long
