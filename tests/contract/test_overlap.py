"""Telling views that share memory from views that only lie in one buffer, against counting addresses one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla.memory import overlaps, overlaps_itself

BUFFER = torch.zeros(400, dtype=torch.int16)


@st.composite
def views(draw):
    rank = draw(st.integers(0, 3))
    shape = draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank))
    strides = draw(st.lists(st.integers(0, 12), min_size=rank, max_size=rank))
    return BUFFER.as_strided(shape, strides, draw(st.integers(0, 100)))


def addresses(view):
    found = [view.storage_offset()] if view.numel() else []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        found = [address + i * stride for address in found for i in range(size)]
    return found


@settings(max_examples=500, deadline=None, derandomize=True)
@given(views(), views())
def test_two_views_overlap_when_they_share_an_address(a, b):
    assert overlaps(a, b) is bool(set(addresses(a)) & set(addresses(b)))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(views())
def test_a_view_overlaps_itself_when_an_address_comes_twice(view):
    assert overlaps_itself(view) is (len(addresses(view)) != len(set(addresses(view))))


def test_views_of_different_element_sizes_are_compared_by_bytes():
    half = BUFFER[:8]
    assert overlaps(half, BUFFER[6:10].view(torch.int32))
    assert not overlaps(half, BUFFER[8:12].view(torch.int32))
    assert not overlaps(half, torch.zeros(8, device="meta"))
