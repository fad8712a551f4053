"""Calls whose tensors are on another GPU than the current one: every backend works where the query is."""

from __future__ import annotations

import pytest
import torch

import mla
from mla.testing import Call, Case, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

CALL = mla.trtllm_batch_decode_with_kv_cache_mla
DENSE = Case(lengths=(700, 0, 70), q_len=2, heads=16, page_size=64, scale_form="tensor", out="bfloat16", lse="flat")
CASES = [
    DENSE,
    Case(lengths=(300, 5), heads=16, page_size=16, sinks="normal", out="bfloat16"),
    Case(lengths=(300, 90), heads=128, top_k=80, slots="holes", out="bfloat16"),
    Case(lengths=(300, 90), heads=16, query="float8_e4m3fn", cache="float8_e4m3fn", out="bfloat16"),
]


@pytest.fixture(params=["reference", "trtllm-gen", "xqa", "auto"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def run(call: Call, backend: str) -> list[torch.Tensor]:
    """Copies of out and lse on the host; skips what this backend does not take here."""
    verdict = mla.explain(**call.arguments).verdicts.get(backend)
    if verdict and verdict.state == "refused":
        pytest.skip(" ".join(verdict.reasons))
    return [part.cpu() for part in call.run(CALL, backend=backend) if part is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_calls_on_two_gpus_in_turn_give_the_same_bits_and_leave_the_current_device_alone(
    backend: str, case: Case
) -> None:
    here, there = build(case, "cuda:0"), build(case, "cuda:1")
    expected = run(here, backend)
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            assert same(run(there, backend), expected)
            assert torch.cuda.current_device() == current
            assert same(run(here, backend), expected)
            assert torch.cuda.current_device() == current


def test_the_work_goes_to_the_current_stream_of_the_query_s_device(backend: str) -> None:
    call = build(DENSE, "cuda:1")
    query = call.arguments["query"].clone()
    expected = run(call, backend)
    call.arguments["query"].zero_()
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds, on this stream alone
        call.arguments["query"].copy_(query)
        with torch.cuda.device(0):
            out, lse = call.run(CALL, backend=backend)
    stream.synchronize()
    assert same([out.cpu(), lse.cpu()], expected)


@pytest.mark.parametrize("backend", ["trtllm-gen", "xqa", "auto"], indirect=True)
def test_a_graph_captured_on_one_gpu_is_replayed_while_the_other_is_current(backend: str) -> None:
    call = build(DENSE, "cuda:1")
    expected = run(call, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1):
        with torch.cuda.graph(graph):
            out, lse = call.run(CALL, backend=backend)
        out.zero_()
    with torch.cuda.device(0):
        graph.replay()
        torch.cuda.synchronize(1)
    assert same([out.cpu(), lse.cpu()], expected)
    call.arguments["seq_lens"].sub_(1).clamp_(min=0)
    graph.replay()
    torch.cuda.synchronize(1)
    shorter = [out.cpu(), lse.cpu()]
    assert same(run(call, backend), shorter)
    assert not same(shorter, expected)


def test_tensors_of_two_gpus_are_refused(backend: str) -> None:
    here, there = build(DENSE, "cuda:0"), build(DENSE, "cuda:1")
    run(there, backend)
    with pytest.raises(ValueError, match="kv_cache is on cuda:0; expected cuda:1"):
        CALL(**there.arguments | {"kv_cache": here.arguments["kv_cache"]}, backend=backend)
