"""The deal of a batch over teams: what the kernels work out is what a model of a few lines of Python deals by hand."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mla.backends.trtllm_gen.plan_kernel import (
    first_unit,
    keys_of,
    locate,
    owner_of,
    pieces_in,
    units_before,
)


@triton.jit
def teams_kernel(
    out, lens, stride_lens: tl.int64, items: tl.int32, teams: tl.int32, most: tl.int32, Q_LEN: tl.constexpr,
    SPARSE: tl.constexpr, BN: tl.constexpr, PIECE: tl.constexpr, OVERHEAD: tl.constexpr, MIN_UNITS: tl.constexpr,
    SCAN: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Per team: (used, its first item, units before that item, its first unit, the next team's first unit)."""
    team = tl.program_id(0)
    used, line, sharing, item, before = locate(
        team, teams, lens, stride_lens, items, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD, MIN_UNITS, SCAN, ONCE
    )
    tl.store(out + team * 5 + 0, used)
    tl.store(out + team * 5 + 1, item)
    tl.store(out + team * 5 + 2, before)
    tl.store(out + team * 5 + 3, first_unit(team, line, sharing))
    tl.store(out + team * 5 + 4, first_unit(team + 1, line, sharing))


@triton.jit
def items_kernel(
    out, lens, stride_lens: tl.int64, items: tl.int32, teams: tl.int32, most: tl.int32, Q_LEN: tl.constexpr,
    SPARSE: tl.constexpr, BN: tl.constexpr, PIECE: tl.constexpr, OVERHEAD: tl.constexpr, MIN_UNITS: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """Per item: (used, units before it, keys, blocks, pieces, owner of its first and of its last piece)."""
    item = tl.program_id(0)
    used, line, sharing, before = units_before(
        item, teams, lens, stride_lens, items, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD, MIN_UNITS, SCAN
    )
    keys, _ = keys_of(lens, stride_lens, item, item < items, Q_LEN, SPARSE, most)
    blocks, pieces = pieces_in(keys, BN, PIECE)
    tl.store(out + item * 7 + 0, used)
    tl.store(out + item * 7 + 1, before)
    tl.store(out + item * 7 + 2, keys)
    tl.store(out + item * 7 + 3, blocks)
    tl.store(out + item * 7 + 4, pieces)
    tl.store(out + item * 7 + 5, owner_of(before + OVERHEAD, line, sharing))
    tl.store(out + item * 7 + 6, owner_of(before + OVERHEAD + pieces - 1, line, sharing))


@dataclass(frozen=True)
class Batch:
    """A batch and the constants of a deal; `scan` items are looked at together."""

    lengths: tuple[int, ...]
    teams: int
    q_len: int = 1
    sparse: bool = False
    most: int = 1 << 20
    block: int = 32
    piece: int = 0
    overhead: int = 1
    min_units: int = 1
    scan: int = 8

    def keys(self) -> list[int]:
        """Keys to walk, for each item."""
        wanted = [n - self.q_len + t + 1 for n in self.lengths for t in range(self.q_len)]
        wanted = wanted if self.sparse else list(self.lengths)
        return [min(max(n, 0), self.most) for n in wanted]


@dataclass
class Deal:
    """Who has what: `hands[team]` lists (item, piece) and, for an item's overhead, (item, None)."""

    line: list[tuple[int, int | None]]
    hands: list[list[tuple[int, int | None]]]


def rounded_up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit


def dealt(batch: Batch) -> Deal:
    """All units in one line, dealt to the teams one after another, as evenly as whole units allow.

    Items of one size: to so many teams that each has whole items, or that each item has teams of its own.
    """
    line: list[tuple[int, int | None]] = []
    sizes = set()
    for item, keys in enumerate(batch.keys()):
        pieces = rounded_up(max(rounded_up(keys, batch.block), 1), batch.piece or 1)
        line += [(item, None)] * batch.overhead + [(item, piece) for piece in range(pieces)]
        sizes.add(pieces)
    used = max(1, min(batch.teams, len(line) // batch.min_units))
    items = len(batch.keys())
    each = rounded_up(items, batch.teams)  # items of the busiest team, if all items are dealt whole
    if len(sizes) == 1 and items % each == 0 and Fraction(each * batch.teams, items) <= Fraction(17, 16):
        used = items // each
    lines = 1
    teams_each = batch.teams // items  # teams of an item, if none has a part of two
    enough = 1 <= teams_each * batch.min_units <= len(line) // items
    if len(sizes) == 1 and enough and Fraction(batch.teams, teams_each * items) <= Fraction(17, 16):
        used, lines = teams_each * items, items
    share, longer = divmod(len(line) // lines, used // lines)
    hands, rest = [], line
    for team in range(batch.teams):
        take = 0 if team >= used else share + 1 if team % (used // lines) < longer else share
        hands.append(rest[:take])
        rest = rest[take:]
    assert rest == []
    return Deal(line, hands)


def run(batch: Batch, *, stride: int = 1, dtype: torch.dtype = torch.int32) -> tuple[list[list[int]], list[list[int]]]:
    """What the kernels say: (per team, per item)."""
    items = len(batch.keys())
    lens = torch.full((len(batch.lengths), stride), 1 << 30, dtype=dtype)
    lens[:, 0] = torch.tensor(batch.lengths)
    constants: dict[str, Any] = dict(Q_LEN=batch.q_len, SPARSE=batch.sparse, BN=batch.block, PIECE=batch.piece)
    constants |= dict(OVERHEAD=batch.overhead, MIN_UNITS=batch.min_units, SCAN=batch.scan)
    by_team = torch.full((batch.teams, 5), -1, dtype=torch.int32)
    by_item = torch.full((items, 7), -1, dtype=torch.int32)
    shared = (lens, stride, items, batch.teams, batch.most)
    teams_kernel[(batch.teams,)](by_team, *shared, **constants, ONCE=items <= batch.scan)
    items_kernel[(items,)](by_item, *shared, **constants)
    return by_team.tolist(), by_item.tolist()


def hold(batch: Batch, **how: Any) -> Deal:
    """The kernels against the model, and the model against what a deal must be; returns the deal."""
    by_hand = dealt(batch)
    line, hands = by_hand.line, by_hand.hands
    used = sum(bool(hand) for hand in hands)
    by_team, by_item = run(batch, **how)

    # What any deal must be: every unit once, in order, and no share more than one unit larger than another.
    assert [unit for hand in hands for unit in hand] == line
    sizes = {len(hand) for hand in hands[:used]}
    assert max(sizes) - min(sizes) <= 1

    for team, (in_use, item, before, first, end) in enumerate(by_team):
        assert in_use == used
        if team < used:
            assert line[first:end] == hands[team]
            assert item == hands[team][0][0]
            assert line[before][0] == item
            assert before == 0 or line[before - 1][0] != item
        else:
            assert first >= len(line)
            assert (item, before) == (len(by_item), len(line))

    keys = batch.keys()
    for item, (in_use, before, walked, blocks, pieces, begins, ends) in enumerate(by_item):
        own = [piece for one, piece in line if one == item and piece is not None]
        assert (in_use, walked) == (used, keys[item])
        assert line[before][0] == item
        assert before == 0 or line[before - 1][0] != item
        assert own == list(range(pieces))
        assert blocks == max(rounded_up(walked, batch.block), 1)
        assert (item, own[0]) in hands[begins]
        assert (item, own[-1]) in hands[ends]
        assert all(any(unit[0] == item for unit in hands[team]) for team in range(begins, ends + 1))
    return by_hand


def cut_items(batch: Batch, by_hand: Deal) -> int:
    """Items of which more than one team has a piece."""
    owners: dict[int, set[int]] = {}
    for team, hand in enumerate(by_hand.hands):
        for item, piece in hand:
            if piece is not None:
                owners.setdefault(item, set()).add(team)
    assert sorted(owners) == list(range(len(batch.keys())))
    return sum(len(teams) > 1 for teams in owners.values())


LENGTHS = st.one_of(st.integers(0, 3), st.integers(0, 200), st.sampled_from([31, 32, 33, 64, 1000, -5]))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    sparse = draw(st.booleans())
    count = draw(st.integers(1, 8) if sparse else st.integers(1, 24))
    uniform = draw(st.sampled_from([False, False, True]))
    lengths = [draw(LENGTHS)] * count if uniform else draw(st.lists(LENGTHS, min_size=count, max_size=count))
    piece = draw(st.sampled_from([0, 0, 1, 3, 64]))
    return Batch(
        tuple(lengths),
        teams=draw(st.integers(1, 12)),
        q_len=draw(st.integers(1, 4)),
        sparse=sparse,
        most=draw(st.sampled_from([1 << 20, 1 << 20, 40])),
        block=draw(st.sampled_from([16, 32, 64])),
        piece=piece,
        overhead=draw(st.sampled_from([0, 1, 1, 2])),
        min_units=draw(st.sampled_from([1, 1, 2, 5])),
        scan=draw(st.sampled_from([2, 4, 8, 32])),
    )


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@example(Batch((0,), teams=5))
@example(Batch((0, 0, 0), teams=2, overhead=0))
@example(Batch((64,) * 16, teams=5, scan=4))
@example(Batch((4096, 1, 1), teams=8, piece=64, overhead=0, scan=2))
@example(Batch((9, 0, 70), teams=4, q_len=3, sparse=True, most=40, scan=4))
@given(batches())
@pytest.mark.no_cover  # coverage doubles the time, and the others run the same lines
def test_the_kernels_deal_as_the_model_does(batch: Batch) -> None:
    hold(batch)


@pytest.mark.parametrize(("stride", "dtype"), [(1, torch.int64), (3, torch.int32), (2, torch.int64)])
def test_lengths_of_either_dtype_and_of_any_stride_are_dealt_alike(stride: int, dtype: torch.dtype) -> None:
    hold(Batch((70, 0, 33, 1000), teams=5, scan=2), stride=stride, dtype=dtype)
    hold(Batch((70, 0, 33), teams=5, q_len=2, sparse=True, most=64, scan=2), stride=stride, dtype=dtype)


@pytest.mark.parametrize("scan", [2, 8, 32])
def test_how_many_items_are_looked_at_together_changes_nothing(scan: int) -> None:
    lengths = tuple((37 * b) % 211 for b in range(20))
    batch = Batch(lengths, teams=7, scan=scan)
    assert run(batch) == run(Batch(lengths, teams=7, scan=64))
    hold(batch)


@pytest.mark.parametrize(
    ("items", "teams", "used"),
    [
        (8, 8, 8),
        (16, 8, 8),
        (128, 132, 128),
        (64, 66, 64),
        (4, 5, 5),
        (12, 8, 8),
        (33, 16, 16),
        (31, 16, 16),
        (2, 8, 8),
    ],
)
def test_equal_items_stay_whole_where_that_costs_at_most_a_sixteenth(items: int, teams: int, used: int) -> None:
    """A team of the whole deal has ceil(items / teams) items; a perfect deal would give it items / teams."""
    batch = Batch((320,) * items, teams=teams, scan=32)
    by_hand = hold(batch)
    assert sum(bool(hand) for hand in by_hand.hands) == used
    each = rounded_up(items, teams)
    cheap = Fraction(each * teams, items) <= Fraction(17, 16) and items % each == 0
    assert (cut_items(batch, by_hand) == 0) == cheap


@pytest.mark.parametrize(
    ("items", "teams", "used"), [(64, 132, 128), (16, 132, 128), (32, 264, 256), (3, 9, 9), (5, 17, 17), (3, 16, 16)]
)
def test_equal_items_have_teams_of_their_own_where_that_leaves_at_most_a_sixteenth_idle(
    items: int, teams: int, used: int
) -> None:
    by_hand = hold(Batch((320,) * items, teams=teams, scan=32))
    assert sum(bool(hand) for hand in by_hand.hands) == used
    owned = [{item for item, _ in hand} for hand in by_hand.hands[:used]]
    apart = Fraction(teams, teams // items * items) <= Fraction(17, 16)
    assert all(len(items) == 1 for items in owned) == apart


def test_one_long_item_is_cut_among_all_teams() -> None:
    batch = Batch((32 * 79,), teams=8)  # 79 blocks and one unit of overhead: 10 units for each team
    by_hand = hold(batch)
    assert [len(hand) for hand in by_hand.hands] == [10] * 8


def test_no_team_gets_less_than_the_least_number_of_units() -> None:
    by_hand = hold(Batch((32 * 19,), teams=8, min_units=5))
    assert [len(hand) for hand in by_hand.hands] == [5, 5, 5, 5, 0, 0, 0, 0]
    assert [len(hand) for hand in hold(Batch((0,), teams=3, min_units=5)).hands] == [2, 0, 0]


def test_an_item_without_a_key_is_dealt_one_empty_block() -> None:
    _, by_item = run(Batch((0, -3, 1), teams=4))
    assert [row[2:5] for row in by_item] == [[0, 1, 1], [0, 1, 1], [1, 1, 1]]


def test_a_length_asks_for_no_more_work_than_the_bound() -> None:
    batch = Batch((1 << 30, 5), teams=4, most=65)
    assert [row[2] for row in run(batch)[1]] == [65, 5]
    hold(batch)
