"""Who takes which tiles: what the decode kernel deals, what the merge kernel makes of it, and what any deal must be."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mla.backends.xqa.config import Config
from mla.backends.xqa.emulator.launch import Grid, run_grid
from mla.backends.xqa.emulator.memory import GlobalMemory
from mla.backends.xqa.kernel.schedule import ALONE
from mla.backends.xqa.plan import argument_names
from mla.backends.xqa.specialize import KERNELS
from tests.xqa.dealing_kernels import merging, nothing, take_note

Hands = dict[int, list[tuple[int, int]]]  # team -> the (request, tile) that it takes
WITHOUT_ATTENTION = dict(attend=take_note, prefetch_likely=nothing, finish_rows=nothing, leave_part=nothing)


def dealt(tiles, teams, *, overhead=2, at_least=1, one_each=None, piece=0) -> Hands:
    """The deal of requests of so many tiles, held to what any deal must be."""
    config = Config()
    lengths = torch.tensor([count * config.tile for count in tiles], dtype=torch.int32)
    columns = max([*tiles, 1])
    found = torch.zeros(len(tiles), columns, dtype=torch.int32)
    begins = torch.zeros(len(tiles) + 1, dtype=torch.int32)
    joins = torch.full((len(tiles), 2), -1, dtype=torch.int32)  # first and last team of each request
    sizes = dict(requests=len(tiles), overhead=overhead, teams=teams, one_each=one_each or teams, at_least=at_least)

    def run(kernel: Callable[..., Any], blocks: int, data: dict[str, torch.Tensor], numbers: dict[str, int]) -> None:
        memory = GlobalMemory()
        arguments = numbers | sizes
        for name, tensor in (data | {"lengths": lengths}).items():
            memory.add(name, tensor, writable=name != "lengths")
            arguments[name] = tensor.data_ptr()
        run_grid(Grid(kernel, config, arguments, blocks, 256, config.shared_bytes, WITHOUT_ATTENTION), memory)

    numbers = dict.fromkeys(argument_names("decode"), 0) | dict(query_request=4 * columns, length_step=4, room=1 << 20)
    numbers |= dict(q_len=1, heads=1, tiles=1, piece=piece, pieces=1)
    run(KERNELS["decode"], teams, {"query": found, "begins": begins}, numbers)
    if len(tiles) <= 128 and not piece:  # else the merge kernel reads what the decode kernel wrote, or asks for pieces
        run(merging, len(tiles), {"data": joins}, {})
    owners = [row[:count] for row, count in zip((found - 1).tolist(), tiles, strict=True)]
    taken = [team for teams_of_one in owners for team in teams_of_one]
    assert all(0 <= team < teams for team in taken), "a tile that nobody takes"
    assert taken == sorted(taken)
    if joins[0, 0] >= 0:
        for teams_of_one, (first, last) in zip(owners, joins.tolist(), strict=True):
            assert not teams_of_one or (first, last) == (teams_of_one[0], teams_of_one[-1])
            assert sorted(set(teams_of_one)) == list(range(first, last + 1)) or not teams_of_one
    hands: Hands = {}
    for request, teams_of_one in enumerate(owners):
        for tile, team in enumerate(teams_of_one):
            hands.setdefault(team, []).append((request, tile))
    return hands


@pytest.mark.parametrize(
    ("tiles", "teams"), [([256] * 64, 132), ([256] * 63 + [3], 132), ([8] * 300, 300), ([1, 999], 7)]
)
def test_no_team_has_more_than_its_share(tiles, teams):
    assert max(map(len, dealt(tiles, teams).values())) <= -(-(sum(tiles) + 2 * len(tiles)) // teams)


def test_few_tiles_are_not_cut_into_more_parts_than_joining_is_worth():
    assert len(dealt([20, 20], 264, one_each=132, at_least=2)) == 20
    assert len(dealt([128] * 4, 264, one_each=132)) == 4 * 130 // 4  # 520 units: four for each of 132
    assert sorted(map(len, dealt([128] * 16, 264, one_each=132).values()))[1] >= ALONE - 2  # two are overhead


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
    hands = dealt(tiles, teams, overhead=overhead, at_least=at_least, one_each=one_each, piece=piece)
    if piece:
        return
    even = Fraction(sum(tiles) + overhead * len(tiles), teams)
    alone = min(-(-(sum(tiles) + overhead * len(tiles)) // one_each), ALONE)
    most = max(-(-even // 1), alone, at_least)
    assert all(len(hand) <= most for hand in hands.values())
