"""Kernels that do nothing but deal: as the decode kernel walks its tiles, and as the merge kernel finds who took them."""

from mla.backends.xqa.isa import block_index, shared_base, store_i32, thread_index_anew
from mla.backends.xqa.kernel.constants import THREADS
from mla.backends.xqa.kernel.numbers import int32, int64, larger_int
from mla.backends.xqa.kernel.schedule import (
    begin_and_total,
    first_unit_of,
    next_share,
    request_at,
    share_of,
    sum_of_first,
    team_of,
    tiles_of,
    units_after,
    units_of_one,
)


def dealing(data, lengths, requests, overhead, teams, one_each, at_least, piece, columns):
    """data [requests, columns]: one more than the team that takes each tile, walked as the decode kernel walks."""
    smem, team = shared_base(), int32(block_index())
    measure = (lengths, int64(4), 0, 1, 1 << 20)
    units = units_of_one(measure, requests, overhead, int32(0))
    units_of_first = sum_of_first(smem, measure, requests, overhead, units)
    total = int32(units_of_first[2] + units_after(smem, measure, requests, overhead, int32(THREADS)))
    share = share_of(total, teams, one_each, at_least)
    unit = first_unit_of(team, total, share)
    end = first_unit_of(team + 1, total, share)
    if unit < end:
        request, begin = request_at(smem, measure, requests, overhead, units_of_first, unit)
        while unit < end:
            count = tiles_of(measure, request, 1)
            first_tile, end_tile, after = next_share(unit, end, begin, overhead, count, piece)
            for tile in range(first_tile, end_tile):
                at = data + (int64(request) * columns + tile) * 4
                store_i32(at, team + 1, thread_index_anew() == 0)
            unit = after
            if after >= begin + overhead + count:
                begin = int32(begin + overhead + count)
                request = int32(request + 1)


def merging(data, lengths, requests, overhead, teams, one_each, at_least):
    """data [requests, 2]: (first team, last team), as the merge kernel finds them."""
    request = int32(block_index())
    measure = (lengths, int64(4), 0, 1, 1 << 20)
    begin, total = begin_and_total(measure, requests, overhead, request)
    share = share_of(total, teams, one_each, at_least)
    first = int32(begin + overhead)
    first_thread = thread_index_anew() == 0
    at = data + int64(request) * 8
    store_i32(at, team_of(first, share), first_thread)
    store_i32(at + 4, team_of(first + larger_int(tiles_of(measure, request, 1) - 1, 0), share), first_thread)
