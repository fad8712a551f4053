"""Hypothesis strategies that draw cases: words and integers, never tensors, so that failures shrink and print."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from mla.testing.case import CHOICES, Case
from mla.testing.profile import PUBLIC_PAIRS, Profile

WIDE_PAIRS = (("float32", "float32"), ("float64", "float64"))
PAGE_SIZES = (1, 2, 3, 5, 7, 13, 16, 17, 31, 32, 61, 64, 101, 127, 128)
HEADS = (1, 3, 4, 6, 8, 12, 16, 20, 40, 64, 96, 128, 130)


def cases(
    *,
    pairs: tuple[tuple[str, str], ...] = PUBLIC_PAIRS + WIDE_PAIRS,
    max_batch: int = 5,
    max_q_len: int = 9,
    heads: tuple[int, ...] | None = None,
    max_heads: int = 130,
    page_sizes: tuple[int, ...] | None = None,
    max_page_size: int = 128,
    max_length: int = 160,
    max_top_k: int = 40,
    sparse: bool = True,
    sinks: bool = True,
    lse: bool = True,
    strides: bool = True,
) -> st.SearchStrategy[Case]:
    """Cases with every feature mixed, within the limits given (a kernel's profile, say).

    Args:
        pairs: (query, cache) dtype names; every pair that the reference takes by default.
        heads, page_sizes: the values to draw from; any up to max_heads and max_page_size by default.
        max_batch, max_q_len, max_heads, max_page_size, max_length, max_top_k: inclusive upper bounds; B starts at 0.
        sparse, sinks, lse, strides: whether to draw the feature at all.
    """
    sizes = st.sampled_from(page_sizes) if page_sizes else _up_to(max_page_size, PAGE_SIZES)
    counts = st.sampled_from(heads) if heads else _up_to(max_heads, HEADS)

    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        def word(name: str, wanted: bool = True) -> Any:
            return draw(st.sampled_from(CHOICES[name])) if wanted else CHOICES[name][0]

        query, cache = draw(st.sampled_from(pairs))
        q_len = draw(st.integers(1, max_q_len))
        top_k = draw(st.one_of(st.just(0), st.integers(1, max_top_k))) if sparse else 0
        batch = draw(st.sampled_from([*range(1, max_batch + 1), 0]))
        length = st.one_of(st.integers(0, 3), st.integers(0, max_length))
        return Case(
            lengths=tuple(draw(st.lists(length, min_size=batch, max_size=batch))),
            q_len=q_len,
            heads=draw(counts),
            page_size=draw(sizes),
            query=query,
            cache=cache,
            out=word("out"),
            top_k=top_k,
            slots=word("slots", top_k > 0),
            sinks=word("sinks", sinks),
            scores=word("scores"),
            values=word("values"),
            bmm1=draw(st.sampled_from([Case.bmm1, 0.05, 0.1352, 0.0, -0.07])),
            bmm2=draw(st.sampled_from([1.0, 0.5, 3.0, -2.0])),
            scale_form=word("scale_form"),
            unread=word("unread"),
            tail=word("tail"),
            spare_pages=draw(st.integers(0, 3)),
            table_slack=draw(st.integers(0, 3)),
            query_layout=word("query_layout", strides),
            cache_layout=word("cache_layout", strides),
            table_layout=word("table_layout", strides),
            out_layout=word("out_layout", strides),
            cache_rank=draw(st.sampled_from([3, 4])),
            out_rank=draw(st.sampled_from([3, 4])) if q_len == 1 else 4,
            tables=word("tables"),
            lens=word("lens"),
            lse=word("lse", lse),
            lse_base=word("lse_base"),
            max_slack=draw(st.sampled_from([0, 1, 1000, 1 << 20])),
            workspace=word("workspace"),
            seed=draw(st.integers(0, 2**16)),
        )

    return draw_case()


def _up_to(limit: int, favourites: tuple[int, ...]) -> st.SearchStrategy[int]:
    """1 to `limit`, with the values where kernels break drawn more often."""
    return st.one_of(
        st.integers(1, min(5, limit)), st.sampled_from([n for n in favourites if n <= limit]), st.integers(1, limit)
    )


def claimed_cases(profile: Profile) -> st.SearchStrategy[Case]:
    """Cases that a profile claims, all of its features mixed."""
    return cases(
        pairs=profile.pairs,
        max_batch=4,
        max_q_len=min(profile.max_q_len or 9, 9),
        heads=profile.heads,
        max_heads=40,
        page_sizes=profile.page_sizes,
        sparse=profile.sparse,
        sinks=profile.sinks,
        lse=profile.lse,
        strides=profile.strides,
    ).filter(lambda case: not profile.why_not(case))
