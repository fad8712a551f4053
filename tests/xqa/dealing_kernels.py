"""The deal without the attention: what the decode kernel may call instead, and what the merge kernel makes of it."""

from mla.backends.xqa.isa import block_index, store_i32, thread_index_anew
from mla.backends.xqa.kernel.numbers import NEGATIVE_INFINITY, float32, int32, int64, larger_int
from mla.backends.xqa.kernel.schedule import begin_and_total, share_of, team_of, tiles_of


def take_note(smem, query, pool, table, shape, share, seen, scale, words, sums):
    """In place of `attend`: for each tile of the share one more than this block's number, which is its team's.

    Where the request's queries would begin there is an int32 for each tile.
    """
    first_tile, end_tile = share
    for tile in range(first_tile, end_tile):
        store_i32(query[0] + int64(tile) * 4, block_index() + 1, thread_index_anew() == 0)
    return NEGATIVE_INFINITY, float32(0.0)


def nothing(*arguments):
    """In place of what reads inputs ahead, and of what writes rows."""


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
