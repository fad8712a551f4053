"""Registering, loading on first use, and telling "refused" from "broken"."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch

import mla
from mla import registry
from mla.testing import Case, build

CALL = mla.trtllm_batch_decode_with_kv_cache_mla


class Kernel:
    name = "mine"

    def why_not(self, problem: mla.Problem) -> list[str]:
        return []

    def run(self, problem: mla.Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        out.zero_()


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    mla.backends()
    copies = {name: dataclasses.replace(entry) for name, entry in registry._entries.items()}
    monkeypatch.setattr(registry, "_entries", copies)


@pytest.fixture
def module(monkeypatch):
    """An importable module `someones_kernel` with a backend in it."""
    made = types.ModuleType("someones_kernel")
    made.backend = Kernel()
    monkeypatch.setitem(sys.modules, "someones_kernel", made)
    return made


def test_our_names_are_known_from_the_first_day():
    listed = mla.backends()
    assert list(listed)[:3] == ["reference", "trtllm-gen", "xqa"]
    assert {listed[name].source for name in list(listed)[:3]} == {"mla"}


def test_listing_loads_nothing():
    mla.register_backend("mine", "no_such_module_anywhere:backend")
    assert not mla.backends()["mine"].loaded
    assert mla.backends()["mine"].broken is None


def test_a_string_is_loaded_on_first_use(module):
    mla.register_backend("mine", "someones_kernel:backend")
    assert mla.backends()["mine"] == mla.BackendInfo("mine", "registered", "someones_kernel:backend", False, None)
    build(Case()).run(CALL, backend="mine")
    assert mla.backends()["mine"].loaded


@pytest.mark.parametrize("target", ["someones_kernel", "someones_kernel:", ":backend", "a b:c", "a.b:c.d", "", "a:b:c"])
def test_a_target_that_is_no_module_and_attribute_is_refused(target):
    with pytest.raises(ValueError, match="expected 'module:attr'"):
        mla.register_backend("mine", target)


@pytest.mark.parametrize("name", ["", "auto"])
def test_reserved_names_are_refused(name):
    with pytest.raises(ValueError, match="expected a non-empty name other than 'auto'"):
        mla.register_backend(name, Kernel())


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(TypeError, match="name is a int; expected a str"):
        mla.register_backend(3, Kernel())


def test_a_taken_name_is_refused_and_both_sides_are_named():
    with pytest.raises(ValueError, match=r"backend 'xqa' is known already \(from mla\); replace=True replaces it"):
        mla.register_backend("xqa", "someones_kernel:backend")
    mla.register_backend("mine", Kernel())
    with pytest.raises(ValueError, match=r"known already \(from registered\)"):
        mla.register_backend("mine", Kernel())


def test_replace_replaces():
    mla.register_backend("mine", "no_such_module_anywhere:backend")
    mla.register_backend("mine", Kernel(), replace=True)
    assert mla.backends()["mine"].target is None
    assert build(Case()).run(CALL, backend="mine")[0].abs().max() == 0


def test_an_object_without_the_parts_of_a_backend_is_refused():
    with pytest.raises(TypeError, match=r"backend 'mine' is a SimpleNamespace without why_not, run; see mla.Backend"):
        mla.register_backend("mine", types.SimpleNamespace(name="mine"))


def test_a_backend_under_another_name_is_refused():
    with pytest.raises(ValueError, match="backend 'other' calls itself 'mine'"):
        mla.register_backend("other", Kernel())


def test_a_kernel_satisfies_the_protocol():
    assert isinstance(Kernel(), mla.Backend)
    assert all(isinstance(registry.load(name), mla.Backend) for name in registry.BUILT_IN)


def test_a_broken_backend_is_broken_by_name_and_not_refused():
    mla.register_backend("mine", "no_such_module_anywhere:backend")
    with pytest.warns(mla.BackendPluginWarning, match=r"backend 'mine' \(from registered\) is broken: loading no_such"):
        explanation = mla.explain(**build(Case()).arguments)
    assert explanation.backend == "reference"
    assert explanation.verdicts["mine"].state == "broken"
    assert "ModuleNotFoundError" in explanation.reasons["mine"][0]
    with pytest.raises(mla.BackendBroken, match="ModuleNotFoundError"):
        build(Case()).run(CALL, backend="mine")
    assert "ModuleNotFoundError" in (mla.backends()["mine"].broken or "")


def test_a_missing_attribute_is_broken(module):
    mla.register_backend("mine", "someones_kernel:nothing")
    with pytest.warns(mla.BackendPluginWarning, match="AttributeError"), pytest.raises(mla.BackendBroken):
        build(Case()).run(CALL, backend="mine")


def test_a_loaded_thing_that_is_no_backend_is_broken(module):
    module.backend = 7
    mla.register_backend("mine", "someones_kernel:backend")
    with pytest.warns(mla.BackendPluginWarning, match="without name, why_not, run"), pytest.raises(mla.BackendBroken):
        build(Case()).run(CALL, backend="mine")


def test_a_why_not_that_raises_is_broken_and_named():
    class Raises(Kernel):
        def why_not(self, problem: mla.Problem) -> list[str]:
            raise OSError("libcuda.so.1")

    mla.register_backend("mine", Raises())
    with pytest.warns(mla.BackendPluginWarning, match="its why_not raised OSError: libcuda.so.1"):
        assert mla.explain(**build(Case()).arguments).verdicts["mine"].state == "broken"
    with pytest.warns(mla.BackendPluginWarning), pytest.raises(mla.BackendBroken, match="OSError"):
        build(Case()).run(CALL, backend="mine")


def test_a_broken_kernel_of_ours_leaves_auto_working(monkeypatch):
    from mla import dispatch

    registry._entries["trtllm-gen"] = registry._Entry("trtllm-gen", "mla", "no_such_module_anywhere:backend")
    problem = dataclasses.replace(build(Case()).problem, device=torch.device("cuda:0"), capability=(9, 0))
    monkeypatch.setattr(dispatch, "_warned_devices", set())
    with pytest.warns(mla.BackendPluginWarning, match="trtllm-gen.*broken"), pytest.warns(mla.ReferenceFallbackWarning):
        assert dispatch.select(problem, "auto").name == "reference"


# Capabilities as data


def claims(**limits: object) -> list[str]:
    case = Case(
        lengths=(9,),
        q_len=2,
        heads=20,
        top_k=4,
        sinks="normal",
        page_size=16,
        query="float16",
        cache="float16",
        out="float32",
    )
    return mla.Capabilities(**limits).refusals(build(case).problem)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"device_types": ("cuda",)}, "the tensors are on cpu; it runs on cuda"),
        ({"compute_capabilities": ((9, 0), (10, 0))}, "the device is no NVIDIA GPU; it runs on sm_90, sm_100"),
        ({"dtype_pairs": frozenset([(torch.bfloat16, torch.bfloat16)])}, "query/cache dtypes are float16/float16; it takes bfloat16/bfloat16"),
        ({"out_dtypes": (torch.bfloat16,)}, "out is float32; it writes bfloat16"),
        ({"sparse": False}, "the call is sparse (top 4); it does dense only"),
        ({"sinks": False}, "sinks are given; it has none"),
        ({"lse": False}, "the log-sum-exp is asked for; it returns none"),
        ({"max_q_len": 1}, "there are 2 query tokens per request; it takes at most 1"),
        ({"max_heads": 16}, "there are 20 heads; it takes at most 16"),
        ({"page_sizes": (32, 64)}, "the page size is 16; it takes 32, 64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_each_limit_refuses_with_both_sides_in_a_sentence(limits, sentence):
    assert claims(**limits) == [sentence]


def test_every_reason_is_given_and_not_the_first_only():
    assert len(claims(sparse=False, sinks=False, lse=False, max_heads=1)) == 4


def test_dense_only_can_be_refused_too_and_the_default_claims_everything():
    assert mla.Capabilities(dense=False).refusals(build(Case()).problem) == [
        "the call is dense (sparse_mla_top_k=0); it does sparse only"
    ]
    assert claims() == []
