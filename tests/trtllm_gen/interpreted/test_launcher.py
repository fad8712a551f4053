"""Launches are made once for each kind of call and each alignment, and forgotten when there are too many."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla.backends.trtllm_gen import backend, launch
from mla.testing import Case, assert_close, build

Decode = Callable[..., Any]
PLAIN = Case(lengths=(40, 3), heads=2, q_len=2, page_size=16)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[launch.Launch]:
    """The launches that are made from now on, in order."""
    found: list[launch.Launch] = []

    class Counted(launch.Launch):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            found.append(self)

    monkeypatch.setattr(launch, "Launch", Counted)
    monkeypatch.setattr(backend, "_launcher", None)
    monkeypatch.setattr("mla.recall._seen", {})
    return found


def test_one_launch_serves_all_calls_of_a_kind(decode: Decode, made: list[Any]) -> None:
    for seed in range(3):
        call = build(dataclasses.replace(PLAIN, seed=seed, bmm1=0.1 + seed, max_slack=seed))
        assert_close(decode(**call.arguments), call.problem)
    assert len(made) == 1


@pytest.mark.parametrize("name", ["query", "kv_cache", "out"])
def test_a_call_of_a_known_kind_at_other_addresses_is_right(decode: Decode, made: list[Any], name: str) -> None:
    """What was compiled for addresses that are multiples of 16 is not used for others."""
    call = build(dataclasses.replace(PLAIN, out="bfloat16"))
    decode(**call.arguments)
    value = call.arguments[name]
    moved = torch.empty(value.numel() + 1, dtype=value.dtype)[1:].view(value.shape).copy_(value)
    changed = call.arguments | {name: moved}
    for _ in range(2):
        assert_close(decode(**changed), call.problem)
    assert [one.shape.decode_constants["ALIGN"] for one in made] == [8, 1]


def test_too_many_launches_are_all_forgotten(monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> None:
    monkeypatch.setattr(launch.Launcher, "MOST", 2)
    launcher = launch.Launcher()
    for batch in (1, 2, 3, 3, 1):
        call = build(dataclasses.replace(PLAIN, lengths=(3,) * batch))
        out, lse = torch.empty(batch, 2, 2, 512).bfloat16(), torch.empty(batch, 2, 2)
        launcher(call.problem, out, lse)
        assert_close((out, lse), call.problem)
    assert len(made) == 4
    assert len(launcher._known) == 2


def test_a_warm_up_makes_the_launch_that_the_call_uses(decode: Decode, made: list[Any]) -> None:
    import mla

    call = build(PLAIN)
    assert mla.warmup(**call.arguments, backend="trtllm-gen") == "trtllm-gen"
    assert len(made) == 1
    assert_close(decode(**call.arguments), call.problem)
    assert len(made) == 1
