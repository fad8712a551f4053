"""Kernels that do nothing but deal: as the decode kernel walks its tiles, and as the merge kernel finds who took them."""

from mla.backends.xqa.isa import block_index, shared_base, store_i32, thread_index_anew
from mla.backends.xqa.kernel.numbers import int32, int64, larger_int
from mla.backends.xqa.kernel.schedule import (
    deal,
    deal_of_one,
    first_unit_of,
    keep,
    kept_cost,
    kept_end,
    kept_team,
    next_share,
    request_at,
    team_of,
    tiles_of,
    units_of_one,
)


def dealing(data, lengths, requests, overhead, teams, one_each, at_least, piece, columns):
    """data [requests, columns]: one more than the team that takes each tile, walked as the decode kernel walks."""
    smem, team = shared_base(), int32(block_index())
    measure = (lengths, int64(4), 0, 1, 1 << 20)
    units = units_of_one(measure, requests, overhead, int32(0))
    units_of_first, _, total, share, cost = deal(
        smem, measure, requests, overhead, units, teams, one_each, at_least, piece
    )
    unit = first_unit_of(team, total, share)
    end = first_unit_of(team + 1, total, share)
    if unit < end:
        keep(smem, cost, end, team)
        request, begin = request_at(smem, measure, requests, overhead, units_of_first, unit)
        while unit < kept_end(smem):
            count = tiles_of(measure, request, 1)
            first_tile, end_tile, after = next_share(unit, kept_end(smem), begin, kept_cost(smem), count, piece)
            for tile in range(first_tile, end_tile):
                at = data + (int64(request) * columns + tile) * 4
                store_i32(at, kept_team(smem) + 1, thread_index_anew() == 0)
            unit = after
            begin_of_next = int32(begin + kept_cost(smem) + count)
            if after >= begin_of_next:
                begin = begin_of_next
                request = int32(request + 1)


def merging(data, lengths, requests, overhead, teams, one_each, at_least):
    """data [requests, 2]: (first team, last team), as the merge kernel finds them."""
    request = int32(block_index())
    measure = (lengths, int64(4), 0, 1, 1 << 20)
    count = tiles_of(measure, request, 1)
    begin, share, cost = deal_of_one(measure, requests, overhead, request, count, teams, one_each, at_least)
    first = int32(begin + cost)
    first_thread = thread_index_anew() == 0
    at = data + int64(request) * 8
    store_i32(at, team_of(first, share), first_thread)
    store_i32(at + 4, team_of(first + larger_int(count - 1, 0), share), first_thread)
