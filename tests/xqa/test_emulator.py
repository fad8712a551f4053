"""What the emulator finds, told one by one on the smallest kernels; and that traces and bank counts tell the truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mla.backends.xqa.config import Config
from mla.backends.xqa.emulator.backend import CONSUMER, EmulatedBackend
from mla.backends.xqa.emulator.banks import fewest, wavefronts
from mla.backends.xqa.emulator.errors import EmulatorError
from mla.backends.xqa.emulator.launch import Grid, run_block, run_grid
from mla.backends.xqa.emulator.memory import GlobalMemory
from mla.backends.xqa.emulator.trace import Trace
from mla.backends.xqa.isa import (
    EVICT_NORMAL,
    barrier,
    block_index,
    cp_async16,
    cp_async_commit,
    cp_async_wait_0,
    cp_async_wait_1,
    load_i32,
    quotient,
    set_shared_i32,
    set_shared_u32,
    shared_base,
    shared_f32x2,
    shared_u32,
    store_f32,
    store_i32,
    thread_index,
)
from mla.backends.xqa.kernel.numbers import cuda, float32, select
from mla.backends.xqa.plan import Machine
from mla.testing import Case, build

HOPPER = Machine((9, 0), 4)


def launched(kernel, *, blocks=1, threads=64, shared_bytes=1024, words=64):
    """Run a kernel with `data`, a tensor of int32 that it may write, and `fixed`, one that it may not."""
    data, fixed = torch.arange(words, dtype=torch.int32), torch.arange(words, dtype=torch.int32)
    memory = GlobalMemory()
    memory.add("data", data, writable=True)
    memory.add("fixed", fixed)
    arguments = {"data": data.data_ptr(), "fixed": fixed.data_ptr()}
    run_grid(Grid(kernel, Config(), arguments, blocks, threads, shared_bytes), memory)
    return data


def right(data, fixed):
    at = thread_index() * 4
    store_i32(data + at, load_i32(fixed + at, 1, 0) + 1, 1)


def past_the_end(data, fixed):
    load_i32(fixed + thread_index() * 8, 1, 0)


def nowhere(data, fixed):
    load_i32(64, 1, 0)


def crooked(data, fixed):
    load_i32(fixed + 2, 1, 0)


def into_an_input(data, fixed):
    store_i32(fixed + thread_index() * 4, 0, 1)


def all_to_one_place(data, fixed):
    store_i32(data, thread_index(), 1)


def every_block_to_one_place(data, fixed):
    store_i32(data + thread_index() * 4, block_index(), 1)


def past_shared(data, fixed):
    set_shared_u32(shared_base() + thread_index() * 32, 0)


def before_shared(data, fixed):
    set_shared_u32(thread_index() * 4, 0)


def crooked_shared(data, fixed):
    shared_f32x2(shared_base() + thread_index() * 4)


def read_behind_a_write(data, fixed):
    smem = shared_base() + thread_index() * 4
    set_shared_u32(smem, thread_index())
    shared_u32(shared_base() + (63 - thread_index()) * 4)


def write_behind_a_read(data, fixed):
    shared_u32(shared_base())
    set_shared_i32(shared_base(), 1, thread_index() == 0)


def write_behind_a_write(data, fixed):
    set_shared_i32(shared_base(), 1, thread_index() == 0)
    set_shared_i32(shared_base(), 1, thread_index() == 32)


def two_warps_at_once(data, fixed):
    set_shared_i32(shared_base(), 1, (thread_index() & 31) == 0)


def not_waited_for(data, fixed):
    lane = thread_index()
    cp_async16(shared_base() + lane * 16, fixed, 16, lane < 16, EVICT_NORMAL)
    cp_async_commit()
    shared_u32(shared_base())


def waited_for_too_few(data, fixed):
    lane = thread_index()
    cp_async16(shared_base() + lane * 16, fixed, 16, lane < 16, EVICT_NORMAL)
    cp_async_commit()
    cp_async_wait_1()
    shared_u32(shared_base())


def waited_for_without_a_barrier(data, fixed):
    lane = thread_index()
    cp_async16(shared_base() + lane * 16, fixed, 16, lane < 16, EVICT_NORMAL)
    cp_async_commit()
    cp_async_wait_0()
    shared_u32(shared_base())


def written_while_landing(data, fixed):
    lane = thread_index()
    cp_async16(shared_base() + lane * 16, fixed, 16, lane < 16, EVICT_NORMAL)
    set_shared_i32(shared_base(), 0, lane == 0)


def copied_while_landing(data, fixed):
    lane = thread_index()
    cp_async16(shared_base(), fixed, 16, lane == 0, EVICT_NORMAL)
    cp_async16(shared_base(), fixed, 16, lane == 0, EVICT_NORMAL)


def half_a_copy(data, fixed):
    cp_async16(shared_base() + thread_index() * 16, fixed, 8, 1, EVICT_NORMAL)


def a_copy_by_no_policy(data, fixed):
    cp_async16(shared_base() + thread_index() * 16, fixed, 16, 1, 0)


def a_branch_of_some(data, fixed):
    if thread_index() < 5:
        barrier()


def a_loop_of_some(data, fixed):
    for _ in range(thread_index()):
        barrier()


def an_address_of_64_bits(data, fixed):
    shared_u32(fixed)


def a_division_by_zero(data, fixed):
    quotient(thread_index(), thread_index())


def a_division_of_less_than_nothing(data, fixed):
    quotient(thread_index() - 5, 3)


FOUND = {
    "bounds": (past_the_end, nowhere, past_shared, before_shared),
    "alignment": (crooked, crooked_shared),
    "read-only": (into_an_input,),
    "two blocks": (all_to_one_place, every_block_to_one_place),
    "race": (
        read_behind_a_write,
        write_behind_a_read,
        write_behind_a_write,
        two_warps_at_once,
        waited_for_without_a_barrier,
    ),
    "unfinished copy": (not_waited_for, waited_for_too_few, written_while_landing, copied_while_landing),
    "divergence": (a_branch_of_some, a_loop_of_some),
    "range": (an_address_of_64_bits, half_a_copy, a_copy_by_no_policy),
    "division": (a_division_by_zero, a_division_of_less_than_nothing),
}


def test_a_right_kernel_runs():
    assert torch.equal(launched(right), torch.arange(1, 65, dtype=torch.int32))


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [(kind, kernel) for kind, kernels in FOUND.items() for kernel in kernels],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_what_must_not_be_is_found(kind, kernel):
    with pytest.raises(EmulatorError) as caught:
        launched(kernel, blocks=2)
    assert caught.value.kind == kind


def test_a_message_tells_warps_and_place():
    with pytest.raises(
        EmulatorError, match="race: warp 0 reads byte 252 of shared memory, which warp 1 touched with no"
    ):
        launched(read_behind_a_write)


def test_an_error_of_the_kernel_itself_comes_through():
    def broken(data, fixed):
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        launched(broken)


def a_register_unwritten(data, fixed):
    registers = cuda.local.array(4, float32)
    registers[0] = float32(1.0)
    store_f32(data, registers[1], thread_index() == 0)


def test_a_register_that_was_never_written_is_found():
    with pytest.raises(EmulatorError, match="register 1 is read before it was written"):
        launched(a_register_unwritten)


def choose(data, fixed):
    lane = thread_index()
    store_i32(data + lane * 4, select(lane < 3, 7, lane), 1)


def test_select_is_by_thread():
    assert launched(choose).tolist()[:5] == [7, 7, 7, 3, 4]


def prepared(machine=CONSUMER, **changes):
    call = build(Case(**{"lengths": (70,), "heads": 4} | changes))
    p = call.problem
    out = torch.empty(p.batch, p.q_len, p.num_heads, 512, dtype=torch.bfloat16)
    return EmulatedBackend(machine, teams=1).prepare(p, out), (call, out)


@pytest.mark.parametrize(
    ("changes", "ahead", "late"),
    [
        ({}, 1, False),  # two stages
        ({"heads": 20, "machine": HOPPER}, 2, True),
        ({"heads": 64, "machine": HOPPER}, 1, False),  # three stages
        ({"heads": 64, "machine": HOPPER, "query": "float8_e4m3fn", "cache": "float8_e4m3fn"}, 2, False),
    ],
)
def test_when_the_next_copies_start(changes, ahead, late):
    emulation, _keep = prepared(lengths=(130,), **changes)  # five tiles
    trace = Trace()
    run_block(emulation.decode, emulation.memory, 0, trace=trace)
    started = [event.function == "start_tile" for event in trace if event.name.startswith(("cp_async_commit", "mma_"))]
    assert started.index(False) == (ahead if late else ahead + 1)  # groups of copies before the first product


def test_a_trace_tells_the_life_of_a_tile():
    emulation, _keep = prepared()
    trace = Trace()
    run_block(emulation.decode, emulation.memory, 0, trace=trace)
    assert len(trace.of("mma_bf16", "partial_scores")) == 3 * 18  # tiles of 32 tokens: 9 steps, 16 tokens a warp
    assert len(trace.of("mma_bf16", "multiply")) == 3 * 16  # 32 tokens are 2 steps, 64 dims a warp
    chapters = [function for function, _ in trace.chapters()]
    steps = ["partial_scores", "whole_scores", "softmax", "add_values"]
    assert [function for function in chapters if function in steps][:5] == [*steps, "partial_scores"]
    story = trace.story()
    assert "9 x ldmatrix_x4, 18 x mma_bf16" in story
    assert "thread_index" not in story
    event = trace.of("mma_bf16")[0]
    lane = event.of_lane(5, warp=2)
    assert set(lane) == {"a", "b", "c", "d"}
    assert lane["d"][0] == event.result[0][2 * 32 + 5]
    assert event.path == ("decode", "attend", "partial_scores")
    assert next(iter(trace)).function == trace.events[0].path[-1]
    assert len(trace) == len(trace.events)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 32},
        {"heads": 32, "query": "float8_e4m3fn", "cache": "float8_e4m3fn"},
        {"heads": 64, "machine": HOPPER},
        {"heads": 16, "query": "float8_e4m3fn", "cache": "float8_e4m3fn", "machine": HOPPER},
    ],
)
def test_no_matrix_is_read_with_bank_conflicts(changes):
    emulation, _keep = prepared(lengths=(128,), **changes)  # whole tiles: rows past a length all read the same zeros
    block = run_block(emulation.decode, emulation.memory, 0, banks=True)
    counted = block.shared.banks
    by_function = {}
    for (function, _), conflicts in counted.items():
        taken, least = by_function.get(function, (0, 0))
        by_function[function] = (taken + conflicts.taken, least + conflicts.fewest)
    for function in ("partial_scores", "load_span", "add_values", "load_tile"):
        taken, least = by_function[function]
        assert taken == least, function
    taken, least = by_function["softmax"]
    assert taken <= 2 * least  # its stores of weights go to two rows, whose banks overlap


def test_bank_conflicts_are_counted():
    lanes = np.arange(32)
    assert wavefronts(lanes * 4, 4) == 1
    assert wavefronts(lanes * 0, 4) == 1  # one word for all
    assert wavefronts(lanes * 8, 4) == 2
    assert wavefronts(lanes * 128, 4) == 32
    assert wavefronts(lanes * 16, 16) == 4
    assert wavefronts(lanes * 128, 16) == 32
    assert wavefronts(lanes * 144, 16) == 4  # a pitch of 16 bytes more
    assert fewest(lanes * 128, 16) == 4
    assert fewest(lanes * 0, 4) == 1


def test_a_tile_takes_milliseconds(capsys):
    """Told, not asserted tightly: other work may share the machine."""
    import time

    emulation, _keep = prepared(lengths=(640,), heads=16)
    start = time.perf_counter()
    run_block(emulation.decode, emulation.memory, 0)
    seconds = (time.perf_counter() - start) / 20
    with capsys.disabled():
        print(f"\nemulator: {seconds * 1000:.1f} ms for a tile of 16 rows and 32 tokens")
    assert seconds < 0.25
