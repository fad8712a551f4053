"""`mla.warmup` prepares the backend that the call will run, and runs nothing."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

import mla
from mla import dispatch, registry
from mla.testing import Case, build

CALL = mla.trtllm_batch_decode_with_kv_cache_mla
Seen = tuple[mla.Problem, torch.Tensor, torch.Tensor | None]


class Prepared:
    """A backend that can be warmed up, and remembers that it was."""

    name = "prepared"

    def __init__(self, *reasons: str) -> None:
        self.reasons = list(reasons)
        self.seen: list[Seen] = []

    def why_not(self, problem: mla.Problem) -> list[str]:
        return self.reasons

    def run(self, problem: mla.Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        raise AssertionError("a warm-up must run nothing")

    def warmup(self, problem: mla.Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        self.seen.append((problem, out, lse))


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    mla.backends()
    copies = {name: dataclasses.replace(entry) for name, entry in registry._entries.items()}
    monkeypatch.setattr(registry, "_entries", copies)


@pytest.fixture
def kernel() -> Prepared:
    made = Prepared()
    mla.register_backend("prepared", made)
    return made


def test_it_returns_the_name_of_the_backend_that_the_call_runs(kernel):
    arguments = build(Case()).arguments
    assert mla.warmup(**arguments) == "reference"
    assert mla.warmup(**arguments, backend="prepared") == "prepared"
    assert len(kernel.seen) == 1


def test_auto_warms_up_what_auto_runs(kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "_ANYTHING_ELSE", ("prepared", "reference"))
    assert mla.warmup(**build(Case()).arguments) == "prepared"
    assert len(kernel.seen) == 1


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(9, 4), q_len=3, heads=5, lse="none"),
        Case(lengths=(9, 4), q_len=3, heads=5, lse="returned"),
        Case(lengths=(9, 4), q_len=3, heads=5, out="float32", lse="flat"),
        Case(lengths=(9, 4), heads=5, out="float16", out_rank=3, out_layout="transposed", lse="transposed"),
    ],
    ids=repr,
)
def test_the_backend_is_given_buffers_like_those_of_the_call(kernel, case):
    call = build(case)
    mla.warmup(**call.arguments, backend="prepared")
    ((problem, out, lse),) = kernel.seen
    rows = (2, case.q_len, 5)
    assert (tuple(out.shape), out.dtype, out.stride(-1)) == ((*rows, 512), problem.out_dtype, 1)
    assert (lse is not None) == (case.lse != "none")
    if lse is not None:
        assert (tuple(lse.shape), lse.dtype) == (rows, torch.float32)

    class Runs(Prepared):
        def run(self, problem: mla.Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
            self.seen.append((problem, out, lse))

    mla.register_backend("prepared", runs := Runs(), replace=True)
    call.run(CALL, backend="prepared")
    for warmed, ran in zip(kernel.seen[0][1:], runs.seen[0][1:], strict=True):
        assert (warmed is None) == (ran is None)
        assert warmed is None or (warmed.shape, warmed.stride(), warmed.dtype) == (ran.shape, ran.stride(), ran.dtype)


def test_no_byte_of_any_argument_changes(kernel):
    call = build(Case(lengths=(9, 4), heads=5, out="bfloat16", lse="flat", workspace="noise"))
    before = {n: v.clone().view(torch.uint8) for n, v in call.arguments.items() if isinstance(v, torch.Tensor)}
    for backend in ("prepared", "reference"):
        mla.warmup(**call.arguments, backend=backend)
    assert all(torch.equal(call.arguments[name].view(torch.uint8), bits) for name, bits in before.items())


def test_nothing_is_prepared_for_no_rows(kernel):
    assert mla.warmup(**build(Case(lengths=())).arguments, backend="prepared") == "prepared"
    assert kernel.seen == []


def test_a_backend_without_a_warm_up_has_nothing_to_prepare():
    class Plain:
        name = "plain"

        def why_not(self, problem: mla.Problem) -> list[str]:
            return []

        def run(self, problem: mla.Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
            raise AssertionError("a warm-up must run nothing")

    mla.register_backend("plain", Plain())
    assert mla.warmup(**build(Case()).arguments, backend="plain") == "plain"


def test_it_raises_what_the_call_raises():
    mla.register_backend("prepared", Prepared("the moon is full", "the tide is out"))
    arguments = build(Case()).arguments
    for function in (CALL, mla.warmup):
        with pytest.raises(mla.BackendUnsupported, match="prepared refused: the moon is full") as caught:
            function(**arguments, backend="prepared")
        assert caught.value.reasons == {"prepared": ("the moon is full", "the tide is out")}
    mla.register_backend("lost", "no_such_module_anywhere:backend")
    with pytest.warns(mla.BackendPluginWarning), pytest.raises(mla.BackendBroken, match="ModuleNotFoundError"):
        mla.warmup(**arguments, backend="lost")


def test_what_a_warm_up_raises_comes_through():
    class Fails(Prepared):
        def warmup(self, problem: mla.Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
            raise RuntimeError("ptxas died")

    mla.register_backend("prepared", Fails())
    with pytest.raises(RuntimeError, match="ptxas died"):
        mla.warmup(**build(Case()).arguments, backend="prepared")


def test_it_takes_the_arguments_of_the_call():
    a = build(Case()).arguments
    names = ["query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim", "block_tables", "seq_lens", "max_seq_len"]  # fmt: skip
    assert mla.warmup(*(a[name] for name in names)) == "reference"
    with pytest.raises(TypeError, match="missing a required argument"):
        mla.warmup(*(a[name] for name in names[:3]))
    call, warmup = (inspect.signature(function) for function in (CALL, mla.warmup))
    assert call.parameters == warmup.parameters


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_our_backends_take_what_a_warm_up_gives(name):
    backend: Any = registry.load(name)
    if hasattr(backend, "warmup"):
        assert list(inspect.signature(backend.warmup).parameters) == ["problem", "out", "lse"]
