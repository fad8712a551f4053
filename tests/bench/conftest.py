"""Small cases, plain contenders, and ways to spoil an output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mla.bench import gate
from mla.bench.cases import BenchCase
from mla.bench.contenders import Contender, Way
from mla.bench.inputs import Inputs, make

CPU = torch.device("cpu")
SMALL = BenchCase("small", (70, 3, 130, 64, 65, 9, 40), heads=4, q_len=2)


@pytest.fixture(scope="session")
def small() -> Inputs:
    return make(SMALL, CPU)


@pytest.fixture(scope="session")
def right(small: Inputs) -> gate.Answer:
    return gate.answer(small)


@pytest.fixture
def contender() -> Callable[..., Contender]:
    """contender("name", "peer", spoil): returns the right output, or what `spoil` makes of it."""

    def make_one(name: str, kind: str, spoil: Callable[[torch.Tensor], object] = lambda out: out) -> Contender:
        def prepare(inputs: Inputs) -> list[Way]:
            exact = gate.answer(inputs).out.to(torch.bfloat16)
            return [Way(lambda: spoil(exact.clone()))]  # type: ignore[arg-type, return-value]

        return Contender(name, kind, prepare)

    return make_one
