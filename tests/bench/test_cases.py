"""The cases are those of the table, their floors follow from exact counts, and sweeps go where they say."""

from __future__ import annotations

import pytest

from mla.bench.cases import SWEEPS, BenchCase, choose, named_cases, own_case, real_traffic, scaled_down, sweep
from mla.bench.floors import Ceilings, floor_us, work

CEILINGS = Ceilings(copy_gbs=4268, read_gbs=4000, bf16_tflops=680)

# By hand, from other counts of the same work at the same ceilings; as many digits as were printed.
KNOWN_FLOORS = {
    "tp8_b1_4k": (1.1, 0.05),
    "tp8_b1_32k": (8.9, 0.06),
    "tp8_b32_4k": (35.6, 0.05),
    "tp8_b128_8k": (284, 0.5),
    "tp8_b64_8k_mtp2": (143, 0.5),
    "tp8_b64_8k_mtp4": (144, 0.5),
    "tp2_b64_8k": (144, 0.5),
    "dp_b1_4k": (1.7, 0.05),
    "dp_b1_128k": (53.7, 0.05),
    "dp_b32_4k": (53.7, 0.05),
    "dp_b128_4k": (215, 0.5),
    "dp_b128_8k_ragged": (235, 0.5),
    "dp_b64_8k_mtp2": (430, 0.6),
    "fp8_tp8_b128_8k": (142, 0.5),
    "fp8_dp_b128_4k": (107.4, 0.05),
    "sparse2k_dp_b64_16k": (53.7, 0.05),
    "sparse2k_dp_b128_16k": (107.4, 0.05),
    "sparse2k_dp_b64_16k_mtp2": (107.4, 0.05),
    "real_tp8_b16": (69.9, 0.05),
    "real_tp8_b64": (283, 0.5),
    "real_tp8_b256": (1112, 0.5),
}


@pytest.mark.parametrize("name", KNOWN_FLOORS)
def test_the_floor_of_a_case_is_the_known_one(name: str) -> None:
    expected, digits = KNOWN_FLOORS[name]
    assert floor_us(named_cases()[name], CEILINGS) == pytest.approx(expected, abs=digits)


def test_every_case_of_the_table_is_there() -> None:
    assert set(KNOWN_FLOORS) | {"real_dp_b16", "real_dp_b64", "real_dp_b256"} == set(named_cases())


@pytest.mark.parametrize("top_k", [0, 4, 100])
def test_work_is_what_the_mask_lets_through(top_k: int) -> None:
    case = BenchCase("x", (5, 9, 3), heads=2, q_len=3, top_k=top_k)
    pairs, rows = 0, 0
    for length in case.lengths:
        seen: set[int] = set()
        for token in range(3):
            keys = [j for j in range(length) if j <= length - 3 + token]
            keys = keys[:top_k] if top_k else keys
            pairs += len(keys)
            seen |= set(keys)
        rows += len(seen)
    assert work(case).flops == 2 * pairs * 2 * (576 + 512)
    assert work(case).bytes == rows * 1152 + 9 * 2 * (1152 + 1024)


def test_fp8_halves_the_bytes_of_rows_and_queries_and_doubles_the_rate() -> None:
    wide, narrow = (BenchCase("x", (4096,), heads=128, dtype=dtype) for dtype in ("fp16", "fp8"))
    assert work(wide).bytes - work(narrow).bytes == (4096 + 128) * 576
    assert work(wide).flops == work(narrow).flops
    slow_memory = Ceilings(copy_gbs=1e9, read_gbs=1, bf16_tflops=100)
    assert floor_us(narrow, slow_memory) == floor_us(wide, slow_memory) / 2


def test_the_memory_ceiling_is_the_better_of_copying_and_reading() -> None:
    assert Ceilings(1.0, 2.0, 1.0).gbs == 2.0


def test_real_lengths_are_those_of_the_traffic() -> None:
    traffic = real_traffic()
    assert {slots: (len(snapshots), len(snapshots[0])) for slots, snapshots in traffic.items()} == {
        "b16": (8, 16),
        "b64": (8, 64),
        "b256": (8, 256),
    }
    assert named_cases()["real_dp_b64"].lengths == traffic["b64"][0]
    assert sum(named_cases()["real_tp8_b256"].lengths) == 4110437


@pytest.mark.parametrize(
    ("axis", "values"),
    [("length", [1024 * 2**i for i in range(8)]), ("batch", [2**i for i in range(11)]), ("q_len", [*range(1, 9)])],
)
def test_a_sweep_changes_its_axis_alone(axis: str, values: list[int]) -> None:
    base = own_case((2048,), batch=3, heads=16, q_len=2, dtype="fp8", page_size=32)
    cases = sweep(axis, base)
    assert [case.axis_value for case in cases] == values
    assert len({case.name for case in cases}) == len(values)
    held = {"length": base.longest, "batch": base.batch, "q_len": base.q_len}
    for case in cases:
        assert {"length": case.longest, "batch": case.batch, "q_len": case.q_len} | {axis: 0} == held | {axis: 0}
        assert (case.heads, case.dtype, case.page_size, case.sweep) == (16, "fp8", 32, axis)
        assert not case.ragged
    assert tuple(values) == SWEEPS[axis]


def test_a_case_of_ones_own() -> None:
    case = own_case((4096,), batch=4, heads=16)
    assert (case.lengths, case.name) == ((4096,) * 4, "own_b4_h16_q1_n4096")
    each = own_case((7, 8), batch=2, heads=16, top_k=4, page_size=16, dtype="fp16")
    assert (each.lengths, each.name) == ((7, 8), "own_b2_h16_q1_n8_ragged_fp16_p16_top4")
    drawn = own_case((800,), batch=50, heads=16, ragged=True)
    assert drawn.lengths[0] == 800
    assert all(100 <= length <= 800 for length in drawn.lengths)
    assert drawn.ragged
    assert drawn == own_case((800,), batch=50, heads=16, ragged=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of bf16, fp16, fp8"),
        ({"heads": 0}, "heads is 0; expected at least 1"),
        ({"top_k": -1}, "top_k is -1; expected 0 or more"),
        ({"q_len": 9}, "a length is 8; expected at least q_len, 9"),
        ({"batch": 3}, "2 lengths are given; expected 1 or the batch, 3"),
        ({"ragged": True}, "2 lengths are given; expected 1 when they are drawn"),
    ],
)
def test_numbers_that_make_no_call_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_case(**({"lengths": (8, 8), "batch": 2, "heads": 16} | wrong))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sweep is 'heads'; expected one of length, batch, q_len"):
        sweep("heads", own_case((8,), 1, 1))


def test_names_are_chosen_by_pattern_in_the_order_of_the_table() -> None:
    assert [case.name for case in choose(["real_tp8_*", "tp8_b1_4k"])] == [
        "tp8_b1_4k",
        "real_tp8_b16",
        "real_tp8_b64",
        "real_tp8_b256",
    ]
    with pytest.raises(ValueError, match="no case is named 'tp9'; the cases are tp8_b1_4k, "):
        choose(["tp8_b1_4k", "tp9"])


def test_scaled_down_cases_fit_a_cpu_and_say_so() -> None:
    for case in (*named_cases().values(), *sweep("batch", own_case((4096,), 1, 128))):
        small = scaled_down(case)
        assert small.scaled
        assert (small.name, small.q_len, small.dtype) == (case.name, case.q_len, case.dtype)
        assert sum(small.lengths) * small.heads * small.q_len < 1 << 18
        assert bool(small.top_k) == bool(case.top_k)
