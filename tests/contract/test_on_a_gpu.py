"""What only a GPU can show: no host sync, capture and replay, the current stream, bounded memory, the one warning."""

from __future__ import annotations

import pytest
import torch

import mla
from mla import dispatch
from mla.testing import Case, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CALL = mla.trtllm_batch_decode_with_kv_cache_mla
CASES = [
    Case(lengths=(70, 0, 3), q_len=2, heads=4, scale_form="tensor", sinks="normal", out="bfloat16", lse="flat"),
    Case(lengths=(70, 3), q_len=2, heads=4, top_k=20, slots="holes", scale_form="tensor", out="float32"),
    Case(lengths=(33,), heads=3, query="float8_e4m3fn", cache="float8_e4m3fn", cache_layout="layers"),
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_call_never_waits_for_the_device(backend, case):
    call = build(case, "cuda")
    call.run(CALL, backend=backend)  # compile and load first
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run(CALL, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_appending_and_merging_never_wait_for_the_device():
    call = build(Case(lengths=(70, 0, 3), q_len=2, heads=4), "cuda")
    latents = torch.randn(3, 2, 576, device="cuda")
    out, lse = call.run(CALL, backend="reference")
    torch.cuda.set_sync_debug_mode("error")
    try:
        mla.append_tokens(
            call.arguments["kv_cache"], call.arguments["block_tables"], call.arguments["seq_lens"], latents
        )
        mla.merge_state(out, lse, out, lse)
        mla.quantize_e4m3(latents)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_captured_graph_follows_what_changes_in_place(backend, case):
    first, second = build(case, "cuda"), build(Case(**vars(case) | {"seed": 7, "bmm1": 0.3, "bmm2": 2.0}), "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first.run(CALL, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = first.run(CALL, backend=backend)
    for name, value in first.arguments.items():
        if isinstance(value, torch.Tensor) and name not in ("out", "lse"):
            value.view(torch.uint8).copy_(second.arguments[name].view(torch.uint8)) if value.ndim else value.copy_(
                second.arguments[name]
            )
    if case.scale_form == "float":  # a float was captured with its value
        second.arguments |= {name: first.arguments[name] for name in ("bmm1_scale", "bmm2_scale")}
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    expected, expected_lse = second.run(CALL, backend=backend)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_the_work_goes_to_the_current_stream(backend):
    call = build(Case(lengths=(300, 5), heads=4), "cuda")
    query = call.arguments["query"].clone()
    expected = call.run(CALL, backend=backend)[0].clone()
    call.arguments["query"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds, on this stream alone
        call.arguments["query"].copy_(query)
        out = call.run(CALL, backend=backend)[0]
    stream.synchronize()
    assert torch.equal(out, expected)


def test_memory_is_bounded_by_what_is_read_and_not_by_the_pool():
    pool = torch.empty(20_000, 64, 576, dtype=torch.float8_e4m3fn, device="cuda")
    pool[7].fill_(1.0)
    query = torch.zeros(1, 1, 4, 576, device="cuda").bfloat16()
    tables, lengths = torch.tensor([[7]], dtype=torch.int32, device="cuda"), torch.tensor([64], device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    CALL(query, pool, None, 128, 512, 64, tables, lengths, 64, backend="reference")
    assert torch.cuda.max_memory_allocated() - before < 50e6


def test_memory_stays_bounded_for_128_requests_of_8k_and_128_heads():
    query = torch.randn(128, 1, 128, 576, device="cuda").bfloat16()
    pool = torch.randn(4096, 64, 576, device="cuda").bfloat16()
    tables = torch.randint(4096, (128, 128), device="cuda", dtype=torch.int32)
    lengths = torch.full((128,), 8192, device="cuda", dtype=torch.int32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    CALL(query, pool, None, 128, 512, 64, tables, lengths, 8192, bmm1_scale=0.07, backend="reference")
    assert torch.cuda.max_memory_allocated() - before < 500e6  # the results in fp32 and bf16, and one block of keys


def test_auto_says_once_that_it_fell_to_the_reference(monkeypatch):
    call = build(Case(lengths=(5,), heads=2), "cuda")
    if mla.explain(**call.arguments).backend != "reference":
        pytest.skip("a kernel accepts this problem here")
    monkeypatch.setattr(dispatch, "_warned_devices", set())
    with pytest.warns(mla.ReferenceFallbackWarning, match="oracle, not a kernel") as seen:
        call.run(CALL)
    call.run(CALL)
    assert len(seen) == 1
