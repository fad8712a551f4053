# mypy: ignore-errors
"""Which block takes which tokens: dealt evenly on the device, from lengths that the host never reads.

A request (in sparse mode: a query token of one) has `blocks` tiles of keys and costs `blocks + overhead` units. All
units of all requests stand in one line; team i of T takes units [i * share, (i + 1) * share), where share is total / T
rounded up. A team is as many blocks as a request has row tiles: they take the same tokens for other rows. So a team
finishes some requests whole, and shares at most two: one that an earlier team began, and one that the next team goes on
with.

    units     |--- request 0 ---|----------- request 1 -----------|- request 2 -|
    teams     |------- 0 -------------|---------- 1 ----------|--------- 2 -----|
    parts      whole              head |  a later part         | later part, whole

The first `overhead` units of a request stand for what it costs besides its keys; its keys' tiles follow.

So where a request is cut depends on all lengths. In deterministic mode it does not: each request is cut into pieces of
so many tiles, and the team in whose units a piece begins takes all of it.
"""

from mla.backends.xqa.isa import (
    barrier,
    load_i32,
    quotient,
    set_shared_i32,
    shared_i32,
    shuffle_up,
    thread_index_anew,
    warp_sum,
)
from mla.backends.xqa.kernel.constants import FOUND_AT, LONGEST, SPARSE, THREADS, TILE, TILE_BITS
from mla.backends.xqa.kernel.numbers import int32, int64, larger_int, select, smaller_int

ALONE = 8
MEASURED = 4  # requests that each lane of a warp measures in `begin_and_total`


def read_integer(address, wide, ok):
    """An int32 or int64 out of global memory, as int64; 0 where `ok` is 0."""
    low = load_i32(address, ok, 0)
    high = load_i32(address + 4, ok & wide, 0)
    return select(wide != 0, (int64(high) << 32) | (int64(low) & 0xFFFFFFFF), int64(low))


def clipped(length):
    return int32(smaller_int(larger_int(length, int64(0)), int64(LONGEST)))


def visible_tokens(lengths, request, ok):
    """(n of the request's first query token, n of its last): the keys they see. n may be below 0 before clipping.

    lengths: (address, step, wide, Q, columns that the table can hold in tokens).
    """
    address, step, wide, q_len, room = lengths
    if SPARSE:
        owner = quotient(request, q_len)
        token = request - owner * q_len
        length = clipped(read_integer(address + int64(owner) * step, wide, ok))
        first = smaller_int(larger_int(length - q_len + token + 1, 0), room)
        last = first
    else:
        length = clipped(read_integer(address + int64(request) * step, wide, ok))
        first = length - q_len + 1
        last = smaller_int(length, room + 1)  # one token past the table: rows that see it become NaN
    return int32(first), int32(last)


def tiles_of(lengths, request, ok):
    """How many tiles of keys the request has."""
    _, last = visible_tokens(lengths, request, ok)
    return int32((last + (TILE - 1)) >> TILE_BITS)


def block_sum(smem, value):
    """(sum of an int32 over the threads before this one, over all threads). At most 2^31 - 1: the host sees to it."""
    thread = thread_index_anew()
    lane = thread & 31
    warp = thread >> 5
    inclusive = value
    for i in range(5):
        distance = 1 << i
        inclusive = int32(inclusive + select(lane >= distance, shuffle_up(inclusive, distance), 0))
    barrier()  # what stood there before has been read
    set_shared_i32(smem + FOUND_AT + warp * 4, inclusive, lane == 31)
    barrier()
    before = int32(inclusive - value)
    total = int32(0)
    for i in range(THREADS // 32):
        of_warp = shared_i32(smem + FOUND_AT + i * 4)
        before = int32(before + select(i < warp, of_warp, 0))
        total = int32(total + of_warp)
    return before, total


def units_of_one(lengths, requests, overhead, start):
    """Units of this thread's request, of as many requests as there are threads."""
    request = start + thread_index_anew()
    ok = request < requests
    return int32(select(ok, tiles_of(lengths, request, ok) + overhead, 0))


def sum_of_first(smem, lengths, requests, overhead, units):
    """What `units_from` request 0 on gives, from `units_of_one`. A single request's length is read by every thread:
    there is nothing to sum."""
    if requests == 1:
        part = int32(tiles_of(lengths, int32(0), 1) + overhead)
        return units, int32(part - units), part
    before, part = block_sum(smem, units)
    return units, before, part


def units_from(smem, lengths, requests, overhead, start):
    """Units of as many requests as there are threads: (this thread's request's, those before it, all of theirs)."""
    units = units_of_one(lengths, requests, overhead, start)
    before, part = block_sum(smem, units)
    return units, before, part


def units_after(smem, lengths, requests, overhead, start):
    """Units of all requests from `start` on."""
    total = int32(0)
    for first in range(start, requests, THREADS):
        total = int32(total + units_from(smem, lengths, requests, overhead, int32(first))[2])
    return total


def begin_and_total(lengths, requests, overhead, request):
    """(the first unit of a request, units of all requests), found by each warp for itself: of 32 * MEASURED requests at
    most, whose lengths it reads all at once."""
    lane = thread_index_anew() & 31
    before = int32(0)
    total = int32(0)
    for i in range(MEASURED):
        other = int32(lane + 32 * i)
        ok = other < requests
        units = int32(select(ok, tiles_of(lengths, other, ok) + overhead, 0))
        before = int32(before + select(other < request, units, 0))
        total = int32(total + units)
    return warp_sum(before), warp_sum(total)


def request_at(smem, lengths, requests, overhead, units_of_first, unit):
    """(the request that a unit belongs to, its first unit). units_of_first: `units_from` request 0 on."""
    thread = thread_index_anew()
    units, before, part = units_of_first
    found = int32(0)
    begin = int32(0)
    passed = int32(0)
    start = int32(0)
    searching = True
    while searching:
        request = start + thread
        first = passed + before
        here = (first <= unit) & (unit < first + units)
        set_shared_i32(smem + FOUND_AT + 64, request, here)
        set_shared_i32(smem + FOUND_AT + 68, first, here)
        barrier()
        if unit < passed + part:
            found = shared_i32(smem + FOUND_AT + 64)
            begin = shared_i32(smem + FOUND_AT + 68)
            searching = False
        else:
            passed = int32(passed + part)
            start = int32(start + THREADS)
            units, before, part = units_from(smem, lengths, requests, overhead, start)
    return found, begin


def share_of(total, teams, one_each, at_least):
    """Units of a team. Fewer teams than there are take part when each would have less than `at_least` units, or less
    than ALONE while teams share multiprocessors: parts must be joined, and that would cost more.

    one_each: teams, if each multiprocessor had one block only.
    """
    alone = smaller_int(quotient(total + one_each - 1, one_each), ALONE)
    return int32(larger_int(larger_int(quotient(total + teams - 1, teams), alone), at_least))


def first_unit_of(team, total, share):
    """The unit at which a team begins."""
    return int32(smaller_int(team * share, total))


def next_share(unit, end, begin, overhead, count, piece):
    """What a team that stands at `unit` takes next of a request of `count` tiles: (first tile, end, the unit after).

    end: of the team's units. begin: the request's first unit. piece: tiles of a piece, or 0 to cut where teams end. An
    empty share, first tile = end, is none, but for a request without keys: that is taken where it begins.
    """
    keys_begin = begin + overhead
    request_end = keys_begin + count
    if piece > 0:
        number = 0
        if unit > begin:  # the first piece begins with the request, and so in an earlier team
            number = larger_int(quotient(larger_int(unit - keys_begin, 0) + (piece - 1), piece), 1)
        first_tile = number * piece
        starts = select(number == 0, begin, keys_begin + first_tile)
        end_tile = smaller_int(first_tile + piece, count)
        after = smaller_int(keys_begin + first_tile + piece, request_end)
        if (first_tile >= count) | (starts >= end):
            end_tile = first_tile
            after = select(starts >= end, smaller_int(end, request_end), request_end)
    else:
        first_tile = larger_int(unit - keys_begin, 0)
        end_tile = smaller_int(larger_int(end - keys_begin, 0), count)
        after = smaller_int(request_end, end)
    return int32(first_tile), int32(end_tile), int32(after)


def team_of(unit, share):
    """The team that takes a unit."""
    return int32(quotient(unit, share))
