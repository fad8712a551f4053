"""Who takes which tiles: what the decode kernel deals, what the merge kernel makes of it, and what any deal must be."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mla.backends.xqa.config import Config
from mla.backends.xqa.emulator.launch import Grid, run_grid
from mla.backends.xqa.emulator.memory import GlobalMemory
from mla.backends.xqa.kernel.schedule import ALONE
from tests.xqa.dealing_kernels import dealing, merging


@dataclass(frozen=True)
class Deal:
    """owners[request]: the team of each tile. joins[request]: (first team, last team), by the merge kernel."""

    owners: list[list[int]]
    joins: list[tuple[int, int]]

    @property
    def hands(self) -> dict[int, list[tuple[int, int]]]:
        """Team -> the (request, tile) that it takes."""
        hands: dict[int, list[tuple[int, int]]] = {}
        for request, owners in enumerate(self.owners):
            for tile, team in enumerate(owners):
                hands.setdefault(team, []).append((request, tile))
        return hands


def dealt(tiles, teams, *, overhead=2, at_least=1, one_each=None, piece=0) -> Deal:
    """The deal of requests of so many tiles, held to what any deal must be."""
    config = Config()
    lengths = torch.tensor([max(count, 0) * config.tile for count in tiles], dtype=torch.int32)
    columns = max([*tiles, 1])
    owners = torch.zeros(len(tiles), columns, dtype=torch.int32)
    joins = torch.full((len(tiles), 2), -1, dtype=torch.int32)
    sizes = dict(requests=len(tiles), overhead=overhead, teams=teams, one_each=one_each or teams, at_least=at_least)
    for kernel, data, blocks, more in (
        (dealing, owners, teams, dict(piece=piece, columns=columns)),
        (merging, joins, len(tiles), {}),
    ):
        memory = GlobalMemory()
        memory.add("data", data, writable=True)
        memory.add("lengths", lengths)
        arguments = dict(data=data.data_ptr(), lengths=lengths.data_ptr()) | sizes | more
        run_grid(Grid(kernel, config, arguments, blocks, 256, config.shared_bytes), memory)
        if len(tiles) > 128 or piece:  # the merge kernel reads what the decode kernel wrote, or asks for pieces
            break
    found = Deal(
        [row[:count] for row, count in zip((owners - 1).tolist(), tiles, strict=True)],
        [tuple(row) for row in joins.tolist()],
    )
    taken = [team for owners in found.owners for team in owners]
    assert all(0 <= team < teams for team in taken), "a tile that nobody takes"
    assert taken == sorted(taken)
    if joins[0, 0] >= 0:
        for owners, (first, last) in zip(found.owners, found.joins, strict=True):
            assert not owners or (first, last) == (owners[0], owners[-1])
            assert sorted(set(owners)) == list(range(first, last + 1)) or not owners
    return found


@pytest.mark.parametrize(
    ("tiles", "teams"), [([256] * 64, 132), ([256] * 63 + [3], 132), ([8] * 300, 300), ([1, 999], 7)]
)
def test_no_team_has_more_than_its_share(tiles, teams):
    deal = dealt(tiles, teams)
    assert max(map(len, deal.hands.values())) <= -(-(sum(tiles) + 2 * len(tiles)) // teams)


def test_few_tiles_are_not_cut_into_more_parts_than_joining_is_worth():
    assert len(dealt([20, 20], 264, one_each=132, at_least=2).hands) == 20
    assert len(dealt([128] * 4, 264, one_each=132).hands) == 4 * 130 // 4  # 520 units: four for each of 132
    assert sorted(map(len, dealt([128] * 16, 264, one_each=132).hands.values()))[1] >= ALONE - 2  # two are overhead


@st.composite
def batches(draw):
    count = draw(st.integers(1, 12))
    size = st.integers(0, 40)
    alike = draw(st.booleans())
    tiles = [draw(size)] * count if alike else draw(st.lists(size, min_size=count, max_size=count))
    teams = draw(st.integers(1, 16))
    return (
        tiles,
        teams,
        draw(st.integers(0, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, teams)),
        draw(st.sampled_from([0, 0, 4])),
    )


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@example(([5, 5], 8, 2, 1, 8, 0))
@example(([0, 0, 0], 2, 2, 1, 2, 0))
@given(batches())
@pytest.mark.no_cover
def test_every_tile_is_taken_once_and_the_merge_knows_by_whom(batch):
    tiles, teams, overhead, at_least, one_each, piece = batch
    deal = dealt(tiles, teams, overhead=overhead, at_least=at_least, one_each=one_each, piece=piece)
    if piece:
        return
    even = Fraction(sum(tiles) + overhead * len(tiles), teams)
    alone = min(-(-(sum(tiles) + overhead * len(tiles)) // one_each), ALONE)
    most = max(-(-even // 1), alone, at_least)
    assert all(len(hand) <= most for hand in deal.hands.values())
