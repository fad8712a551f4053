"""What only a GPU can show of these kernels: how often they are compiled, capture, streams, and that nothing waits."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mla
from mla.backends.trtllm_gen import backend
from mla.testing import Call, Case, assert_close, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

BASE = Case(lengths=(300, 5, 64), heads=16, scale_form="tensor", lse="flat", out="bfloat16")
CASES = [
    BASE,
    dataclasses.replace(BASE, q_len=2, sinks="normal", page_size=16),
    dataclasses.replace(BASE, top_k=200, slots="holes"),
    dataclasses.replace(BASE, heads=128, query="float8_e4m3fn", cache="float8_e4m3fn"),
    dataclasses.replace(BASE, query_layout="offset", cache_layout="offset", out_layout="offset"),
]


def decode(**arguments: Any) -> Any:
    return mla.trtllm_batch_decode_with_kv_cache_mla(**arguments, backend="trtllm-gen")


def arguments_of(query: torch.Tensor, pool: torch.Tensor, tables: torch.Tensor, lengths: list[int]) -> dict[str, Any]:
    """A dense call without anything that may be left out."""
    return dict(
        query=query,
        kv_cache=pool,
        workspace_buffer=torch.zeros(128 << 20, dtype=torch.uint8, device=query.device),
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=tables,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=query.device),
        max_seq_len=max(lengths),
        bmm1_scale=192**-0.5,
    )


def bits(result: Any) -> list[torch.Tensor]:
    return [part.contiguous().view(torch.uint8).clone() for part in result if part is not None]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this backend was called before in the process, as far as it knows."""
    from mla import recall

    monkeypatch.setattr(recall, "_seen", {})
    monkeypatch.setattr(backend, "_launcher", None)


def kernels() -> list[Any]:
    from mla.backends.trtllm_gen.decode_kernel import decode_kernel
    from mla.backends.trtllm_gen.hopper_kernel import hopper_kernel
    from mla.backends.trtllm_gen.merge_kernel import merge_kernel

    return [decode_kernel, hopper_kernel, merge_kernel]


@pytest.fixture
def compiled(unknown: None) -> Callable[[], int]:
    """How many kernels of ours Triton has compiled or loaded on this device since the test began."""
    caches = [kernel.device_caches for kernel in kernels()]
    device = torch.cuda.current_device()

    def count() -> int:
        return sum(len(cache[device][0]) for cache in caches)

    before = count()
    return lambda: count() - before


@pytest.mark.parametrize("sizes", [
    {"table_slack": (0, 1, 7, 200)},
    {"max_slack": (0, 1, 5000, 1 << 20)},
    {"spare_pages": (0, 1, 50)},
    {"seed": (0, 1, 2)},
], ids=lambda sizes: next(iter(sizes)))  # fmt: skip
def test_a_size_that_may_grow_compiles_nothing_new(compiled: Callable[[], int], sizes: dict[str, Any]) -> None:
    counts = []
    for name, values in sizes.items():
        for value in values:
            call = build(dataclasses.replace(BASE, **{name: value}), "cuda")
            assert_right(call)
            counts.append(compiled())
    assert counts[0] <= 2  # none, where an earlier test has compiled them
    assert set(counts) == {counts[0]}


def test_batches_compile_one_pair_of_kernels_for_each_of_few_sizes(compiled: Callable[[], int]) -> None:
    """Decode: one for each SCAN (and one for more items than the last). Merge: times how many rows there are in all."""
    from mla.backends.trtllm_gen.configurations import SCANS

    batches = (1, 2, 3, 7, 31, 32, 33, 64, 100, 255, 256, 257, 500, 1024, 1025, 1500)
    for batch in batches:
        decode(**build(dataclasses.replace(BASE, lengths=(3,) * batch, page_size=4), "cuda").arguments)
    merges = {merge_constants(batch) for batch in batches}
    assert compiled() <= (len(SCANS) + 1) + len(merges)
    again = compiled()
    for batch in batches:
        decode(**build(dataclasses.replace(BASE, lengths=(2,) * batch, page_size=4, seed=1), "cuda").arguments)
    assert compiled() == again


def merge_constants(batch: int) -> Any:
    """What a merge kernel's code depends on, for so many requests."""
    from mla.backends.trtllm_gen.arguments import shape_of

    problem = build(dataclasses.replace(BASE, lengths=(3,) * batch, page_size=4), "cuda").problem
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert problem.out is not None
    shape = shape_of(problem, problem.out, problem.lse, sms=sms, pdl=True, aligned=True)
    return tuple(sorted((name, str(value)) for name, value in shape.merge_constants.items()))


def assert_right(call: Call) -> None:
    out, lse = call.run(decode)
    twin = build(call.case)
    assert lse is not None
    assert_close((out.cpu(), lse.cpu()), twin.problem)
    assert call.disturbed() == []


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_first_call_in_a_capture_says_what_to_do_and_spoils_nothing(unknown: None, case: Case) -> None:
    call = build(case, "cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    what_to_do = r"call mla.warmup\(\.\.\.\) with the same arguments"
    with pytest.raises(RuntimeError, match=what_to_do), torch.cuda.graph(graph):
        call.run(decode)
    torch.cuda.synchronize()
    assert_right(call)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_after_a_warm_up_the_first_call_is_captured_and_its_replays_follow_the_device(
    unknown: None, case: Case, deterministic: bool
) -> None:
    first = build(case, "cuda")
    second = build(dataclasses.replace(case, lengths=(64, 300, 1), seed=7, bmm1=0.3, bmm2=2.0), "cuda")
    assert mla.warmup(**first.arguments, backend="trtllm-gen", deterministic=deterministic) == "trtllm-gen"
    assert first.disturbed() == []
    assert first.arguments["out"].isnan().all()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out, lse = decode(**first.arguments, deterministic=deterministic)
    for call in (second, build(case, "cuda"), second):
        for name in ("query", "kv_cache", "block_tables", "seq_lens", "sinks", "bmm1_scale", "bmm2_scale"):
            if first.arguments[name] is not None:
                first.arguments[name].copy_(call.arguments[name])
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_close((out.cpu(), lse.cpu()), build(call.case).problem)
        assert same((out, lse), decode(**call.arguments, deterministic=deterministic))


def test_two_streams_with_workspaces_of_their_own_do_not_disturb_each_other() -> None:
    calls = [build(Case(lengths=(20_000, 3, 5000), heads=16, seed=seed), "cuda") for seed in (0, 1)]
    spaces = [torch.zeros(64 << 20, dtype=torch.uint8, device="cuda") for _ in calls]
    expected = [decode(**call.arguments) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    got: list[list[Any]] = [[], []]
    for _ in range(50):
        for index, (call, space, stream) in enumerate(zip(calls, spaces, streams, strict=True)):
            with torch.cuda.stream(stream):
                got[index].append(decode(**call.arguments | {"workspace_buffer": space}))
    torch.cuda.synchronize()
    for right, results in zip(expected, got, strict=True):
        assert all(same(result, right) for result in results)


def test_two_streams_without_a_workspace_do_not_disturb_each_other() -> None:
    calls = [build(Case(lengths=(20_000, 3, 5000), heads=16, seed=seed), "cuda") for seed in (0, 1)]
    expected = [decode(**call.arguments) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    got: list[list[Any]] = [[], []]
    for _ in range(50):
        for index, (call, stream) in enumerate(zip(calls, streams, strict=True)):
            with torch.cuda.stream(stream):
                got[index].append(decode(**call.arguments))
    torch.cuda.synchronize()
    for right, results in zip(expected, got, strict=True):
        assert all(same(result, right) for result in results)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_no_call_after_a_warm_up_waits_for_the_device(unknown: None, case: Case, deterministic: bool) -> None:
    call = build(case, "cuda")
    mla.warmup(**call.arguments, backend="trtllm-gen", deterministic=deterministic)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            decode(**call.arguments, deterministic=deterministic)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", [dataclasses.replace(case, out=None, scale_form="float") for case in CASES], ids=repr)
def test_deterministic_bits_are_those_of_the_row_alone(case: Case) -> None:
    case = dataclasses.replace(case, lengths=(5000, 5, 300, 0, 2049), lse="returned", out_layout="packed")
    call = build(case, "cuda")
    out, lse = decode(**call.arguments, deterministic=True)
    for b in (0, 2, 4):
        one = {name: call.arguments[name][b : b + 1] for name in ("query", "block_tables", "seq_lens")}
        for bound in (5000, 70_000):
            alone = decode(**call.arguments | one | {"max_seq_len": bound}, deterministic=True)
            rows = slice(b * case.q_len, (b + 1) * case.q_len)
            assert same(alone, (out[b : b + 1], lse[rows]))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_enable_pdl_changes_no_bit_and_twenty_runs_are_one(case: Case) -> None:
    first = bits(build(case, "cuda").run(decode))
    for run in range(20):
        call = build(case, "cuda")
        result = decode(**call.arguments, enable_pdl=(None, True, False)[run % 3])
        assert all(torch.equal(a, b) for a, b in zip(bits(result), first, strict=True))


def test_a_warm_call_is_found_again_whatever_the_alignment_of_its_tensors(unknown: None) -> None:
    """A call of the same kind with addresses that are no multiples of 16 takes other code, and is right."""
    call = build(dataclasses.replace(BASE, out=None, lse="returned"), "cuda")
    expected = [part.clone() for part in call.run(decode)]
    for name in ("query", "kv_cache"):
        value = call.arguments[name]
        moved = torch.empty(value.numel() + 1, dtype=value.dtype, device="cuda")[1:].view(value.shape)
        moved.copy_(value)
        out, lse = decode(**call.arguments | {name: moved})
        assert_close((out.cpu(), lse.cpu()), build(call.case).problem)
        again = call.run(decode)
        assert same(again, expected)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "q_len"), [(64, 8192, 16, 1), (32, 4096, 16, 2), (16, 5000, 128, 1)]
)
def test_thousands_of_calls_end_and_give_the_same_bits(batch: int, length: int, heads: int, q_len: int) -> None:
    """A race between the plan and the hand-over to groups of warps once made one call in some hundred never end."""
    draw = torch.Generator("cuda").manual_seed(7)
    pages = -(-length // 64)
    cache = torch.randn(batch * pages, 64, 576, generator=draw, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(batch, q_len, heads, 576, generator=draw, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(batch * pages, generator=draw, device="cuda").to(torch.int32).view(batch, pages)
    arguments = arguments_of(query, cache, tables, [length] * batch)
    wanted = decode(**arguments)
    out, different = torch.empty_like(wanted), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(3000):
        decode(**arguments, out=out)
        different += (out != wanted).any()
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + 60
    while not done.query():
        if time.monotonic() > deadline:
            pytest.exit("a call never ended; the device is lost to this process", returncode=1)
        time.sleep(0.01)
    assert different.item() == 0


PAGES = [(64, 0), (128, 0), (64, 576 * 32), (64, 64), (16, 0)]  # (tokens of a page, numbers between pages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (16, 2), (128, 1)])
def test_bits_do_not_depend_on_how_keys_are_paged(heads: int, q_len: int, dtype: torch.dtype) -> None:
    """Keys that are copied as boxes (the first three) are those that are copied one by one; the rest of a pool is NaN."""
    draw = torch.Generator("cuda").manual_seed(3)
    lengths = [1000, 64, 5, 128, 3, 449]
    keys = torch.randn(len(lengths), 1024, 576, generator=draw, device="cuda").to(dtype)
    query = torch.randn(len(lengths), q_len, heads, 576, generator=draw, device="cuda").to(dtype)
    results = []
    for page_size, between in PAGES:
        in_row = 1024 // page_size
        count = len(lengths) * in_row + 1
        memory = torch.full((count * (page_size * 576 + between),), float("nan"), device="cuda").to(dtype)
        pool = memory.as_strided((count, page_size, 576), (page_size * 576 + between, 576, 1))
        tables = 1 + torch.randperm(count - 1, generator=draw, device="cuda").to(torch.int32).view(len(lengths), in_row)
        for request, length in enumerate(lengths):
            token = torch.arange(length, device="cuda")
            pool[tables[request, token // page_size].long(), token % page_size] = keys[request, :length]
        results.append(decode(**arguments_of(query, pool, tables, lengths), return_lse=True))
    assert all(part.isfinite().all() for part in results[0])
    for result in results[1:]:
        assert same(result, results[0])


def test_calls_of_a_kind_follow_the_pool_to_where_it_lies() -> None:
    call = build(dataclasses.replace(BASE, out=None, lse="none"), "cuda")
    here = call.arguments["kv_cache"]
    there = here.clone() * 2
    expected = [decode(**call.arguments | {"kv_cache": pool}) for pool in (here, there)]
    assert not torch.equal(*expected)
    for run in range(6):
        assert torch.equal(decode(**call.arguments | {"kv_cache": (here, there)[run % 2]}), expected[run % 2])
