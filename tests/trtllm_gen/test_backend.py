"""The backend where no kernel runs: what it claims, what it refuses and why, and what it imports."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch

import mla
from mla import registry
from mla.backends.trtllm_gen import backend
from mla.dispatch import AUTO_ORDER
from mla.testing import Case, build

CHIPS = sorted(AUTO_ORDER)
MISSING = "the package triton is not installed; pip install 'mla[triton]' brings it"
RUNS_ON = "sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_103, sm_120, sm_121"


def on(chip: tuple[int, int] | None, **case: Any) -> mla.Problem:
    """A problem as it would be on that chip; nothing is on a GPU."""
    device = torch.device("cpu" if chip is None else "cuda:0")
    return dataclasses.replace(build(Case(**case)).problem, device=device, capability=chip)


@pytest.fixture
def triton_is(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that Triton is installed, or is not."""
    module = sys.modules["mla.backends.trtllm_gen.backend"]
    return lambda installed: monkeypatch.setattr(module, "_triton_is_missing", lambda: not installed)


# What it says of problems.


def test_the_backend_of_that_name_is_this_one() -> None:
    assert registry.load("trtllm-gen") is backend
    assert backend.name == "trtllm-gen"


@pytest.mark.parametrize("chip", CHIPS, ids=str)
def test_it_accepts_the_whole_contract_from_sm_80_on(chip: tuple[int, int], triton_is: Any) -> None:
    triton_is(True)
    features: list[dict[str, Any]] = [
        {}, {"top_k": 4, "lengths": (9,)}, {"sinks": "normal", "q_len": 9, "heads": 130, "page_size": 7}, {"lengths": ()},
        {"query": "float16", "cache": "float16", "out": "float32"}, {"cache_layout": "offset", "query_layout": "spread"},
    ]  # fmt: skip
    for feature in features:
        assert backend.why_not(on(chip, **feature)) == []
        assert backend.why_not(dataclasses.replace(on(chip, **feature), deterministic=True)) == []


@pytest.mark.parametrize("chip", CHIPS, ids=str)
@pytest.mark.parametrize("query", ["float8_e4m3fn", "bfloat16", "float16"])
def test_an_e4m3_cache_needs_sm_89(chip: tuple[int, int], query: str, triton_is: Any) -> None:
    triton_is(True)
    sentence = f"the cache is float8_e4m3fn and the device sm_{chip[0]}{chip[1]}; Triton has that dtype from sm_89 on"
    assert backend.why_not(on(chip, query=query, cache="float8_e4m3fn")) == ([sentence] if chip < (8, 9) else [])


def test_tensors_on_a_cpu_are_refused(triton_is: Any) -> None:
    triton_is(True)
    assert backend.why_not(on(None)) == [
        "the tensors are on cpu; it runs on cuda",
        f"the device is no NVIDIA GPU; it runs on {RUNS_ON}",
    ]
    with pytest.raises(mla.BackendUnsupported, match="trtllm-gen refused: the tensors are on cpu"):
        build(Case()).run(mla.trtllm_batch_decode_with_kv_cache_mla, backend="trtllm-gen")


@pytest.mark.parametrize("chip", [(7, 5), (11, 0), (13, 0)], ids=str)
def test_other_chips_are_refused_by_name(chip: tuple[int, int], triton_is: Any) -> None:
    triton_is(True)
    (sentence,) = backend.why_not(on(chip))
    assert sentence == f"the device is sm_{chip[0]}{chip[1]}; it runs on {RUNS_ON}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_dtypes_are_left_to_the_reference(dtype: str, triton_is: Any) -> None:
    triton_is(True)
    (sentence,) = backend.why_not(on((9, 0), query=dtype, cache=dtype))
    assert sentence.startswith(f"query/cache dtypes are {dtype}/{dtype}; it takes bfloat16/bfloat16, ")


def test_without_triton_every_problem_is_refused_and_other_reasons_are_told_too(triton_is: Any) -> None:
    triton_is(False)
    assert backend.why_not(on((9, 0))) == [MISSING]
    assert len(backend.why_not(on((8, 0), cache="float8_e4m3fn"))) == 2
    assert backend.why_not(on(None))[-1] == MISSING


def test_whether_triton_is_there_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["mla.backends.trtllm_gen.backend"]
    asked: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", asked.append)
    module._triton_is_missing.cache_clear()
    try:
        assert module._triton_is_missing()
        assert module._triton_is_missing()
    finally:
        module._triton_is_missing.cache_clear()
    assert asked == ["triton"]


def test_it_claims_a_gpu_or_where_triton_interprets_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = backend.capabilities
    assert (gpu.device_types, gpu.compute_capabilities) == (("cuda",), tuple(CHIPS))
    assert gpu.deterministic
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cpu = backend.capabilities
    assert (cpu.device_types, cpu.compute_capabilities) == (("cpu",), None)
    assert cpu.dtype_pairs == gpu.dtype_pairs


def test_listing_asking_and_refusing_load_no_triton() -> None:
    program = (
        "import sys, mla\n"
        "from mla.backends.trtllm_gen import backend, configurations\n"
        "from mla.testing import Case, build\n"
        "call = build(Case())\n"
        "print(mla.explain(**call.arguments).reasons['trtllm-gen'][0])\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'triton'))\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told == "the tensors are on cpu; it runs on cuda\n[]\n"
