"""Hypothesis strategies that draw cases: words and integers, never tensors, so that failures shrink and print."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from mla.testing.case import CHOICES, Case

HALF_PAIRS = [("bfloat16", "bfloat16"), ("float16", "float16")]
FP8_PAIRS = [("float8_e4m3fn", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e4m3fn")]
WIDE_PAIRS = [("float32", "float32"), ("float64", "float64")]


def cases(
    *,
    pairs: list[tuple[str, str]] | None = None,
    max_batch: int = 5,
    max_q_len: int = 9,
    max_heads: int = 130,
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
        pairs: (query, cache) dtype names; every pair of the contract by default.
        max_batch, max_q_len, max_heads, max_page_size, max_length, max_top_k: inclusive upper bounds; B starts at 0.
        sparse, sinks, lse, strides: whether to draw the feature at all.
    """
    primes_too = [size for size in (1, 2, 3, 5, 7, 13, 16, 17, 31, 32, 61, 64, 101, 127, 128) if size <= max_page_size]
    odd_heads = [heads for heads in (1, 3, 4, 6, 8, 12, 16, 20, 40, 64, 96, 128, 130) if heads <= max_heads]

    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        def word(name: str, wanted: bool = True) -> Any:
            return draw(st.sampled_from(CHOICES[name])) if wanted else CHOICES[name][0]

        query, cache = draw(st.sampled_from(pairs or HALF_PAIRS + FP8_PAIRS + WIDE_PAIRS))
        q_len = draw(st.integers(1, max_q_len))
        top_k = draw(st.one_of(st.just(0), st.integers(1, max_top_k))) if sparse else 0
        length = st.one_of(st.integers(0, 3), st.integers(0, max_length))
        return Case(
            lengths=tuple(draw(st.lists(length, max_size=max_batch))),
            q_len=q_len,
            heads=draw(st.one_of(st.integers(1, min(5, max_heads)), st.sampled_from(odd_heads))),
            page_size=draw(st.one_of(st.sampled_from(primes_too), st.integers(1, max_page_size))),
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
