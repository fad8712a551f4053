"""Who computes what: the deal of a ragged batch over a fixed grid, made on the device from the lengths.

Vocabulary
    item    one list of keys and the rows that share it: a request (dense), or one query token of it (sparse).
    block   BN consecutive keys of an item. An item without a key has one empty block, so that its rows are written.
    piece   what is dealt out whole: a block or, where cuts must depend on the item alone, PIECE blocks.
    unit    a piece, or one of the OVERHEAD units before an item's pieces (loading queries, writing rows).
    team    one program per row tile, walking the same blocks at the same time so that the tiles meet in L2.

All units stand in one line, item after item, and each team takes the next `line // sharing` or one more of them; where
all items are of one size, each may be a line of its own (`deal`). An item that lies in one team is finished there; one
that is cut is merged from one part per team. Nobody but the device knows the lengths; decode and merge kernels both make
this plan from them and so agree.
"""

import triton
import triton.language as tl


@triton.jit
def keys_of(lens_ptr, stride_lens, item, live, Q_LEN: tl.constexpr, SPARSE: tl.constexpr, most):
    """(keys to walk, length of the request), for one item or many.

    Dense: all keys of the request, the last Q - 1 of which its earlier query tokens must not see. Sparse: the entries that
    count of one query token's list. `most` bounds the work that a length can ask for: K, or one more than the table holds
    (the key that makes such a row NaN).
    """
    if SPARSE:
        token = item % Q_LEN
        length = tl.load(lens_ptr + (item // Q_LEN).to(tl.int64) * stride_lens, mask=live, other=0).to(tl.int32)
        keys = length - Q_LEN + token + 1
    else:
        length = tl.load(lens_ptr + item.to(tl.int64) * stride_lens, mask=live, other=0).to(tl.int32)
        keys = length
    return tl.minimum(tl.maximum(keys, 0), most), length


@triton.jit
def pieces_in(keys, BN: tl.constexpr, PIECE: tl.constexpr):
    """(blocks, pieces) of an item with that many keys; at least one of each."""
    blocks = tl.maximum((keys + (BN - 1)) // BN, 1)
    if PIECE:
        pieces = (blocks + (PIECE - 1)) // PIECE
    else:
        pieces = blocks
    return blocks, pieces


@triton.jit
def units_of(
    lens_ptr, stride_lens, item, live, Q_LEN: tl.constexpr, SPARSE: tl.constexpr, most,
    BN: tl.constexpr, PIECE: tl.constexpr, OVERHEAD: tl.constexpr,
):  # fmt: skip
    """Units of each item, overhead included; 0 where not `live`."""
    keys, _ = keys_of(lens_ptr, stride_lens, item, live, Q_LEN, SPARSE, most)
    _, pieces = pieces_in(keys, BN, PIECE)
    return tl.where(live, pieces + OVERHEAD, 0)


@triton.jit
def deal(total, largest, items, teams, MIN_UNITS: tl.constexpr):
    """(teams that get work, units of a line, teams that share a line) of `total` units, `largest` of them of one item.

    One line of all units, and no more teams than leave each MIN_UNITS. But where all items are of one size, fewer teams
    are used if at most a sixteenth of them is left out, so that each has items of its own and cuts none, or no team has a
    part of two items: each item is a line of its own then.
    """
    used = tl.minimum(tl.maximum(total // MIN_UNITS, 1), teams)
    items_each, teams_each = (items + teams - 1) // teams, teams // items
    alike = largest * items == total
    whole = alike & (items % items_each == 0) & (items_each * teams * 16 <= items * 17)
    apart = alike & (teams_each > 0) & (teams_each * MIN_UNITS <= largest) & (teams * 16 <= teams_each * items * 17)
    used = tl.where(apart, items * teams_each, tl.where(whole, items // items_each, used))
    lines = tl.where(apart, items, 1)
    return used, total // lines, used // lines


@triton.jit
def first_unit(team, line, sharing):
    """The first unit of a team; of the team after the last one that is used, the number of all units."""
    before = team // sharing
    place = team - before * sharing
    share = line // sharing
    return before * line + place * share + tl.minimum(place, line - share * sharing)


@triton.jit
def owner_of(unit, line, sharing):
    """The team that a unit belongs to."""
    before = unit // line
    place = unit - before * line
    share = line // sharing
    longer = line - share * sharing  # so many teams have one unit more
    edge = longer * (share + 1)
    return before * sharing + tl.where(place < edge, place // (share + 1), longer + (place - edge) // share)


@triton.jit
def locate(
    team, teams, lens_ptr, stride_lens, items, Q_LEN: tl.constexpr, SPARSE: tl.constexpr, most, BN: tl.constexpr,
    PIECE: tl.constexpr, OVERHEAD: tl.constexpr, MIN_UNITS: tl.constexpr, SCAN: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """(teams used, units of a line, teams that share it, first item of the team, units before that item).

    ONCE: items <= SCAN.
    """
    item = tl.arange(0, SCAN)
    if ONCE:
        units = units_of(lens_ptr, stride_lens, item, item < items, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD)
        total = tl.sum(units, 0)
        used, line, sharing = deal(total, tl.max(units, 0), items, teams, MIN_UNITS)
        passed = (item < items) & (tl.cumsum(units, 0) <= first_unit(team, line, sharing))
        found = tl.sum(passed.to(tl.int32), 0)
        before = tl.sum(tl.where(passed, units, 0), 0)
    else:
        total, largest = 0, 0
        for start in range(0, items, SCAN):
            live = start + item < items
            units = units_of(lens_ptr, stride_lens, start + item, live, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD)
            total += tl.sum(units, 0)
            largest = tl.maximum(largest, tl.max(units, 0))
        used, line, sharing = deal(total, largest, items, teams, MIN_UNITS)
        unit = first_unit(team, line, sharing)
        found, before, seen = 0, 0, 0
        for start in range(0, items, SCAN):
            live = start + item < items
            units = units_of(lens_ptr, stride_lens, start + item, live, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD)
            passed = live & (seen + tl.cumsum(units, 0) <= unit)
            found += tl.sum(passed.to(tl.int32), 0)
            before += tl.sum(tl.where(passed, units, 0), 0)
            seen += tl.sum(units, 0)
    return used, line, sharing, found, before


@triton.jit
def units_before(
    item, teams, lens_ptr, stride_lens, items, Q_LEN: tl.constexpr, SPARSE: tl.constexpr, most, BN: tl.constexpr,
    PIECE: tl.constexpr, OVERHEAD: tl.constexpr, MIN_UNITS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """(teams used, units of a line, teams that share it, units before the item)."""
    total, before, largest = 0, 0, 0
    for start in range(0, items, SCAN):
        other = start + tl.arange(0, SCAN)
        units = units_of(lens_ptr, stride_lens, other, other < items, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD)
        total += tl.sum(units, 0)
        largest = tl.maximum(largest, tl.max(units, 0))
        before += tl.sum(tl.where(other < item, units, 0), 0)
    used, line, sharing = deal(total, largest, items, teams, MIN_UNITS)
    return used, line, sharing, before
