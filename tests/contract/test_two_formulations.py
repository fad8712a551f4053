"""The literal and the batched formulation are one function, and the public call is that function, rounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import mla
from mla.reference import decode, decode_literal
from mla.testing import Case, assert_close, build
from mla.testing.strategies import cases

BOUND = 1e-12  # float64, a few thousand operations each


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest relative difference (absolute below 1); equal infinities do not differ."""
    if a.numel() == 0:
        return 0.0
    same = a == b
    return float(torch.where(same, 0.0, (a - b).abs() / (1.0 + a.abs())).max())


def hold_together(case: Case) -> None:
    call = build(case)
    literal, batched = decode_literal(call.problem), decode(call.problem)
    assert distance(literal[0], batched[0]) < BOUND
    assert distance(literal[1], batched[1]) < BOUND
    out, lse = call.run(mla.trtllm_batch_decode_with_kv_cache_mla)
    assert_close(out if lse is None else (out, lse), call.problem, exact=literal)
    assert call.disturbed() == []


@pytest.mark.no_cover  # the other tests run the same lines
@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_literal_batched_and_public_call_agree_on_any_problem(case):
    hold_together(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(lengths=()),
        Case(lengths=(0, 0)),
        Case(lengths=(2, 0, 1), q_len=5),
        Case(lengths=(5000,), heads=2, page_size=127),
        Case(lengths=(4096, 1, 2048), heads=1, q_len=2, page_size=1),
        Case(lengths=(3000,), heads=3, top_k=2500, slots="holes", page_size=7),
        Case(lengths=(40,), top_k=64, slots="front"),
        Case(lengths=(40,), top_k=64, slots="all_holes", sinks="normal"),
        Case(lengths=(130, 7), heads=130, q_len=9, page_size=13),
        Case(lengths=(60,), spare_pages=0, table_slack=0, unread="inf"),
    ],
    ids=repr,
)
def test_the_formulations_agree_where_blocks_and_edges_meet(case):
    hold_together(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_returns_full_precision_when_asked(dtype):
    call = build(Case(lengths=(33, 5), q_len=2, sinks="normal"))
    out, lse = decode(call.problem, dtype)
    assert out.dtype is dtype
    assert lse.dtype is dtype
    exact, _ = decode_literal(call.problem)
    assert distance(out.double(), exact) < (1e-12 if dtype is torch.float64 else 1e-5)


def test_a_float64_problem_is_computed_in_float64():
    case = Case(lengths=(50,), query="float64", cache="float64", out="float32")
    call = build(case)
    out, _ = call.run(mla.trtllm_batch_decode_with_kv_cache_mla)
    assert torch.equal(out, decode_literal(call.problem)[0].float())


def test_float32_products_stay_float32_whatever_the_process_allows():
    call = build(Case(lengths=(300,), query="float32", cache="float32", out="float32"))
    before = call.run(mla.trtllm_batch_decode_with_kv_cache_mla)[0].clone()
    settings_ = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    kept = [setting.fp32_precision for setting in settings_]
    try:
        for setting in settings_:
            setting.fp32_precision = "tf32" if setting is settings_[0] else "bf16"
        after = call.run(mla.trtllm_batch_decode_with_kv_cache_mla)[0]
        assert [setting.fp32_precision for setting in settings_] == ["tf32", "bf16"]  # left as they were found
    finally:
        for setting, value in zip(settings_, kept, strict=True):
            setting.fp32_precision = value
    assert torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_nothing_in_here(dtype):
    call = build(Case(lengths=(300, 5), heads=4, out="float32", sinks="normal"))
    plain = [part.clone() for part in call.run(mla.trtllm_batch_decode_with_kv_cache_mla)]
    literal = decode_literal(call.problem, torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        cast = call.run(mla.trtllm_batch_decode_with_kv_cache_mla)
        cast_literal = decode_literal(call.problem, torch.float32)
        assert torch.is_autocast_enabled("cpu")
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(literal, cast_literal, strict=True))


def test_default_device_and_dtype_of_the_process_mean_nothing():
    call = build(
        Case(lengths=(30, 5), heads=4, out="float32", out_layout="transposed", lse="transposed", sinks="normal")
    )
    plain = [part.clone() for part in call.run(mla.trtllm_batch_decode_with_kv_cache_mla)]
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float16)
    try:
        with mla.strict():
            other = call.run(mla.trtllm_batch_decode_with_kv_cache_mla)
        merged, _ = mla.merge_state(plain[0], plain[1], plain[0], plain[1])
        quantised, _ = mla.quantize_e4m3(plain[0])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    assert merged.device.type == quantised.device.type == "cpu"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("given", [False, True], ids=["new out", "given out"])
def test_a_compiled_caller_gets_the_same_bits(given):
    call = build(
        Case(lengths=(30, 5), heads=4, q_len=2, out="bfloat16" if given else None, lse="flat" if given else "returned")
    )
    plain = [part.clone() for part in call.run(mla.trtllm_batch_decode_with_kv_cache_mla)]

    def caller(scale: float, **arguments):
        out, lse = mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
        return out * scale, lse

    compiled = torch.compile(caller, backend="eager")
    out, lse = compiled(1.0, **call.arguments)
    assert torch.equal(out, plain[0])
    assert torch.equal(lse, plain[1])


def test_inference_mode_and_threads_change_nothing():
    from concurrent.futures import ThreadPoolExecutor

    calls = [build(Case(lengths=(60, 5), heads=4, seed=seed)) for seed in range(6)]
    plain = [call.run(mla.trtllm_batch_decode_with_kv_cache_mla)[0].clone() for call in calls]
    with torch.inference_mode():
        inferred = [call.run(mla.trtllm_batch_decode_with_kv_cache_mla)[0] for call in calls]
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(lambda call: call.run(mla.trtllm_batch_decode_with_kv_cache_mla)[0], calls))
    for a, b, c in zip(plain, inferred, threaded, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
