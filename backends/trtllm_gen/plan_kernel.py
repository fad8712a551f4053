"""Who computes what: the deal of a ragged batch over a fixed grid, made on the device from the lengths.

Vocabulary
    item    one list of keys and the rows that share it: a request (dense), or one query token of it (sparse).
    block   BN consecutive keys of an item. An item without a key has one empty block, so that its rows are written.
    piece   what is dealt out whole: a block or, where cuts must depend on the item alone, PIECE blocks.
    unit    a piece, or one of the OVERHEAD units before an item's pieces (loading queries, writing rows).
    team    one program per row tile, walking the same blocks at the same time so that the tiles meet in L2.

All units stand in one line, item after item, and each team takes the next `total // used` or one more of them. An item
that lies in one team is finished there; one that is cut is merged from one part per team. Nobody but the device knows the
lengths; decode and merge kernels both make this plan from them and so agree.
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
def teams_used(total, largest, items, teams, MIN_UNITS: tl.constexpr):
    """Teams that get work: no more than leave each MIN_UNITS units.

    Where all items are of one size (`largest` times `items` is `total`) and dealing them out whole costs at most a
    sixteenth, fewer teams are used, so that no item is cut and nothing is left to merge.
    """
    used = tl.minimum(tl.maximum(total // MIN_UNITS, 1), teams)
    each = (items + teams - 1) // teams
    whole = (largest * items == total) & (items % each == 0) & (each * teams * 16 <= items * 17)
    return tl.where(whole, items // each, used)


@triton.jit
def first_unit(team, total, used):
    """The first unit of a team; of the team after the last one, `total`."""
    share = total // used
    return team * share + tl.minimum(team, total - share * used)


@triton.jit
def owner_of(unit, total, used):
    """The team that a unit belongs to."""
    share = total // used
    longer = total - share * used  # so many teams have one unit more
    edge = longer * (share + 1)
    return tl.where(unit < edge, unit // (share + 1), longer + (unit - edge) // share)


@triton.jit
def locate(
    team, teams, lens_ptr, stride_lens, items, Q_LEN: tl.constexpr, SPARSE: tl.constexpr, most, BN: tl.constexpr,
    PIECE: tl.constexpr, OVERHEAD: tl.constexpr, MIN_UNITS: tl.constexpr, SCAN: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """(total units, teams used, first item of the team, units before that item). ONCE: items <= SCAN."""
    item = tl.arange(0, SCAN)
    if ONCE:
        units = units_of(lens_ptr, stride_lens, item, item < items, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD)
        total = tl.sum(units, 0)
        used = teams_used(total, tl.max(units, 0), items, teams, MIN_UNITS)
        passed = (item < items) & (tl.cumsum(units, 0) <= first_unit(team, total, used))
        found = tl.sum(passed.to(tl.int32), 0)
        before = tl.sum(tl.where(passed, units, 0), 0)
    else:
        total, largest = 0, 0
        for start in range(0, items, SCAN):
            live = start + item < items
            units = units_of(lens_ptr, stride_lens, start + item, live, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD)
            total += tl.sum(units, 0)
            largest = tl.maximum(largest, tl.max(units, 0))
        used = teams_used(total, largest, items, teams, MIN_UNITS)
        unit = first_unit(team, total, used)
        found, before, seen = 0, 0, 0
        for start in range(0, items, SCAN):
            live = start + item < items
            units = units_of(lens_ptr, stride_lens, start + item, live, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD)
            passed = live & (seen + tl.cumsum(units, 0) <= unit)
            found += tl.sum(passed.to(tl.int32), 0)
            before += tl.sum(tl.where(passed, units, 0), 0)
            seen += tl.sum(units, 0)
    return total, used, found, before


@triton.jit
def units_before(
    item, teams, lens_ptr, stride_lens, items, Q_LEN: tl.constexpr, SPARSE: tl.constexpr, most, BN: tl.constexpr,
    PIECE: tl.constexpr, OVERHEAD: tl.constexpr, MIN_UNITS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """(total units, teams used, units before the item)."""
    total, before, largest = 0, 0, 0
    for start in range(0, items, SCAN):
        other = start + tl.arange(0, SCAN)
        units = units_of(lens_ptr, stride_lens, other, other < items, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD)
        total += tl.sum(units, 0)
        largest = tl.maximum(largest, tl.max(units, 0))
        before += tl.sum(tl.where(other < item, units, 0), 0)
    return total, teams_used(total, largest, items, teams, MIN_UNITS), before
