"""What a kernel must hold, property by property, each with the named cases that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mla.testing import judges
from mla.testing.case import Case

Function = Callable[..., Any]
Judge = Callable[[Function, Case, str], None]


@dataclass(frozen=True)
class Property:
    """One thing that a kernel holds or does not.

    Attributes:
        name: short and stable, for tables.
        sentence: what holds, in plain words.
        cases: cases that ask for it; each is judged alone.
        judge: raises AssertionError (a `Mismatch`, mostly) when the kernel fails the case.
        gpu_only: the cases need a GPU's speed or memory.
        variable: whether heads and page size are what it is about, so that they are not adapted to a profile.
    """

    name: str
    sentence: str
    cases: tuple[Case, ...]
    judge: Judge = judges.right_answer
    gpu_only: bool = False
    variable: bool = False


SMALL = Case(heads=4, page_size=16)
E4M3: dict[str, Any] = {"query": "float8_e4m3fn", "cache": "float8_e4m3fn"}
RAGGED = (37, 1, 64, 130)


def each(base: Case, **choices: Any) -> tuple[Case, ...]:
    """`base` with one field set to each of the given values in turn; several fields one after the other."""
    return tuple(replace(base, **{name: value}) for name, values in choices.items() for value in values)


def uniform(base: Case, **changes: Any) -> Case:
    """q = 0 over positions: every answer is a mean of small integers, so the budget is one rounding of the output."""
    return replace(base, scores="equal", values="position", **changes)


#: Everything that `judge_kernel` asks, in its order.
PROPERTIES: tuple[Property, ...] = (
    Property(
        "mask",
        "each query token sees exactly the keys up to its own position, aligned at the end",
        (
            *(uniform(SMALL, lengths=(13, 20), q_len=q_len, out="float32") for q_len in (1, 2, 3, 4, 5, 8, 9)),
            *(uniform(SMALL, lengths=(length,), q_len=4) for length in (16, 17, 32, 64, 4)),
            replace(SMALL, lengths=(9, 31, 18), q_len=3, out="float32"),
            replace(SMALL, lengths=(7, 12), q_len=6),
        ),
    ),
    Property(
        "length",
        "no key at or past the length counts, whatever the length",
        (
            *(replace(SMALL, lengths=(n,), scores="equal", values="ones", unread="zero") for n in (1, 2, 15, 16, 17, 63, 65, 127, 129, 255, 257)),
            *(uniform(SMALL, lengths=(n, n + 1), out="float32") for n in (3, 31, 33, 47, 62)),
        ),
    ),
    Property(
        "requests",
        "each row belongs to its own request",
        (
            replace(SMALL, lengths=(5, 70, 2), values="request", scores="equal", q_len=3),
            replace(SMALL, lengths=(33, 16, 1, 90), values="request"),
            replace(SMALL, lengths=(4,) * 9, values="request", q_len=2, page_size=2),
            replace(SMALL, lengths=(1, 17, 128, 600), values="request"),
        ),
    ),
    Property(
        "page sizes",
        "every page size gives the same meaning",
        (
            *(uniform(SMALL, lengths=(61, 40), page_size=size, out="float32") for size in (1, 2, 3, 7, 16, 31, 32, 64, 127, 128)),
            *(replace(SMALL, lengths=(150,), page_size=size) for size in (5, 32, 64, 100)),
        ),
        variable=True,
    ),
    Property(
        "pages in any order",
        "tokens are found through the block table, page by page",
        (
            *(replace(SMALL, lengths=(100, 60, 33), page_size=8, seed=seed, out="float32") for seed in range(3)),
            replace(SMALL, lengths=(2000,), heads=2, page_size=32),
            replace(SMALL, lengths=(500, 3), spare_pages=40),
        ),
    ),
    Property(
        "unread memory",
        "nothing that must not be read changes a bit: not NaN, not infinity, not the largest number",
        (
            *each(replace(SMALL, lengths=(13, 0, 35), q_len=2, page_size=4), unread=("nan", "inf", "max", "noise")),
            *each(replace(SMALL, lengths=(13, 35), top_k=20, slots="holes"), unread=("nan", "inf", "max", "noise")),
            *each(replace(SMALL, lengths=(21, 3), **E4M3), unread=("nan", "max")),
            *(replace(SMALL, lengths=(n,), page_size=64) for n in (1, 63, 64, 65, 127, 128)),
        ),
        judges.poison_changes_no_bit,
    ),
    Property(
        "ids past the length",
        "table columns past a length may hold anything, and a table may be of any width",
        (
            *each(replace(SMALL, lengths=RAGGED, table_slack=5), tail=("minus_one", "int_max", "int_min")),
            *each(replace(SMALL, lengths=RAGGED, tail="int_max"), table_slack=(0, 1, 3, 12)),
            *each(replace(SMALL, lengths=(9, 40), top_k=48, q_len=2), tail=("minus_one", "int_max", "int_min", "zero")),
        ),
    ),
    Property(
        "strided pools",
        "page and token strides of the cache are those of the tensor",
        (
            *each(replace(SMALL, lengths=RAGGED), cache_layout=("layers", "every_second", "wider", "offset")),
            *each(replace(SMALL, lengths=(40, 7), top_k=16), cache_layout=("layers", "every_second", "wider")),
            replace(SMALL, lengths=(40, 7), cache_rank=4, cache_layout="layers"),
            *(replace(SMALL, lengths=(40, 7), cache_layout=form, **E4M3) for form in ("layers", "wider")),
            replace(SMALL, lengths=(40, 7), cache_layout="offset", query="float16", cache="float16"),
            replace(SMALL, lengths=(33, 20), q_len=2, cache_layout="offset", page_size=4),
            replace(SMALL, lengths=(1,), page_size=1, spare_pages=0, cache_rank=4),
        ),
    ),
    Property(
        "strided queries",
        "query strides are those of the tensor",
        each(replace(SMALL, lengths=(9, 33, 20), q_len=3), query_layout=("wider", "transposed", "offset", "spread")),
    ),
    Property(
        "tables and lengths",
        "int32 and int64, strided rows, all mean the same",
        (
            *each(replace(SMALL, lengths=(9, 33, 70)), tables=("int64",), lens=("int64",), table_layout=("sliced", "spread")),
            *each(replace(SMALL, lengths=(9, 33, 70), tables="int64"), table_layout=("sliced", "spread")),
            *(replace(SMALL, lengths=(9, 33, 70), q_len=q_len, table_layout="spread", lens="int64", seed=q_len) for q_len in (1, 2)),
            replace(SMALL, lengths=(70, 33, 9), table_layout="sliced", page_size=4),
            replace(SMALL, lengths=(9, 33), top_k=12, q_len=2, tables="int64", table_layout="spread"),
            *each(replace(SMALL, lengths=(20, 33), top_k=14, q_len=3, tables="int64"), table_layout=("packed", "sliced")),
            replace(SMALL, lengths=(20, 33), top_k=14, q_len=3, table_layout="sliced"),
            *each(replace(SMALL, lengths=(9, 33), top_k=12, q_len=2), tables=("int64",), lens=("int64",), table_layout=("sliced", "spread")),
        ),
    ),
    Property(
        "outputs",
        "a given out is filled, whatever its dtype and strides, and returned itself; nothing around it is written",
        (
            *each(replace(SMALL, lengths=(9, 33), q_len=2), out=("bfloat16", "float16", "float32")),
            *each(replace(SMALL, lengths=(9, 33), q_len=2, out="bfloat16"), out_layout=("sliced", "transposed", "offset")),
            *(replace(SMALL, lengths=(9, 33), heads=heads, out="bfloat16", out_layout=form) for heads in (3, 12, 20) for form in ("packed", "sliced")),
            *(replace(SMALL, lengths=(1, 2, 9), query="float16", cache="float16", out=out, seed=seed) for out in ("float16", "float32") for seed in (0, 1)),
            replace(SMALL, lengths=(9, 33), out="bfloat16", out_rank=3),
        ),
    ),
    Property(
        "lse",
        "the log-sum-exp is right in both bases, without bmm2, in buffers of every form",
        (
            *(replace(SMALL, lengths=(8, 33), q_len=2, lse=form, lse_base=base, bmm2=3.0) for form in ("returned", "flat", "rows", "transposed") for base in ("base2", "basee")),
            replace(SMALL, lengths=(9,) * 4, q_len=4, heads=16, lse="flat"),
            *(replace(SMALL, lengths=(0, 2, 50), q_len=3, lse_base=base, lse=form) for base in ("base2", "basee") for form in ("returned", "flat", "rows")),
            *(uniform(SMALL, lengths=(8, 40), lse_base=base) for base in ("base2", "basee")),
        ),
    ),
    Property(
        "scales",
        "bmm1 multiplies the scores and bmm2 the output, and no other factor is hidden for any dtype",
        (
            *(replace(SMALL, lengths=(9, 33), bmm1=b1, bmm2=b2, out="float32") for b1 in (0.05, 0.1352, 0.0, -0.07) for b2 in (0.5, 3.0, -2.0)),
            *(replace(SMALL, lengths=(9, 33), bmm1=b1, bmm2=3.0, **E4M3) for b1 in (0.05, 0.1352)),
            *(replace(SMALL, lengths=(6, 40), scores="one_hot", bmm1=b1, out="float32") for b1 in (0.25, 0.05, 0.6)),
            replace(SMALL, lengths=(20,), scores="one_hot", bmm1=0.25, bmm2=0.5, **E4M3),
        ),
    ),
    Property(
        "scale tensors",
        "a scale may be a tensor of one element, means the same, and is read when the call runs",
        (
            *(replace(SMALL, lengths=(9, 33), bmm1=0.1352, bmm2=3.0, scale_form=form) for form in ("tensor", "tensor4d")),
            replace(SMALL, lengths=(9, 33), bmm1=0.25, bmm2=0.5, scores="one_hot", scale_form="tensor"),
            replace(SMALL, lengths=(20, 5), q_len=2, bmm1=0.05, bmm2=-2.0, scale_form="tensor", out="float32"),
        ),
        judges.scale_tensors_are_read,
    ),
    Property(
        "sinks",
        "a sink is a natural logit added once to the denominator of its head, not scaled, without a value",
        (
            *each(replace(SMALL, lengths=(9, 33, 1), q_len=3, out="float32"), sinks=("normal", "large", "off", "listed")),
            *(replace(SMALL, lengths=(n,), scores="equal", values="ones", sinks="normal", heads=6, bmm1=3.0, out="float32") for n in (1, 7, 64, 300)),
            *(replace(SMALL, lengths=(0, 2), q_len=q_len, sinks=sinks, lse_base="basee") for q_len in (1, 2) for sinks in ("normal", "off")),
            *each(replace(SMALL, lengths=(40, 9), top_k=12, q_len=2), sinks=("normal", "listed")),
            replace(SMALL, lengths=(5, 20), sinks="listed", heads=12),
            *(replace(SMALL, lengths=(9, 20), heads=heads, sinks="normal", q_len=2) for heads in (1, 3, 12, 20, 40, 128)),
            replace(SMALL, lengths=(40, 9), sinks="normal", bmm2=0.5, **E4M3),
        ),
    ),
    Property(
        "heads",
        "every head count is right, and no head is mixed with another",
        tuple(replace(SMALL, lengths=(9, 20), heads=heads, q_len=2) for heads in (1, 3, 6, 8, 12, 16, 20, 24, 40, 64, 96, 128, 130))
        + tuple(replace(SMALL, lengths=(9, 20), heads=heads, top_k=8) for heads in (1, 3, 128)),
        variable=True,
    ),
    Property(
        "empty rows",
        "a row without a key is the identity of merging: out 0, lse minus infinity",
        (
            replace(SMALL, lengths=(0,)),
            replace(SMALL, lengths=(130, 0, 1), out="bfloat16"),
            replace(SMALL, lengths=(2, 0, 5), q_len=4, out="float32"),
            replace(SMALL, lengths=(0, 0, 0), q_len=2, max_slack=1 << 20),
            replace(SMALL, lengths=(20, 1), q_len=2, top_k=4, slots="all_holes"),
            *(replace(SMALL, lengths=(), q_len=q_len) for q_len in (1, 2, 3)),
        ),
    ),
    Property(
        "padded batches",
        "padded requests (length 0, ids -1) change nothing for real ones",
        (
            replace(SMALL, lengths=(130, 0, 1, 0, 0, 0), out="bfloat16", max_slack=5000),
            replace(SMALL, lengths=(0, 0, 17), q_len=2, table_slack=9),
        ),
    ),
    Property(
        "max_seq_len",
        "a max_seq_len that is too large changes nothing",
        each(replace(SMALL, lengths=(37, 1, 64, 130), q_len=2), max_slack=(1, 500, 1 << 20, (1 << 31) - 200)),
    ),
    Property(
        "workspace",
        "contents, size and absence of the workspace mean nothing",
        (
            *each(replace(SMALL, lengths=(37, 1, 64, 300)), workspace=("none", "empty", "zeros", "ones", "noise")),
            *each(replace(SMALL, lengths=(20, 70), q_len=2), workspace=("ones", "noise")),
        ),
    ),
    Property(
        "dtypes",
        "each pair of query and cache dtypes is read as what it is",
        (
            *(replace(SMALL, lengths=(9, 40), q_len=2, query=q, cache=kv) for q, kv in (("float16", "float16"), ("float8_e4m3fn", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e4m3fn"))),
            *(uniform(SMALL, lengths=(9, 16), query=q, cache=kv, out="float32") for q, kv in (("float16", "float16"), ("float8_e4m3fn", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn"))),
            *(replace(SMALL, lengths=(9, 30), query=q, cache="float8_e4m3fn", scores="peaked", out="float32") for q in ("bfloat16", "float16")),
            *(replace(SMALL, lengths=(11, 11), heads=heads, q_len=q_len, **E4M3) for heads, q_len in ((12, 1), (32, 2), (96, 1), (20, 3))),
        ),
    ),
    Property(
        "extreme scores",
        "large, equal and one-sided scores stay right: nothing overflows, nothing is rounded too early",
        (
            *(replace(SMALL, lengths=(40, 9), scores=scores, out="float32") for scores in ("peaked", "flat", "equal")),
            *(replace(SMALL, lengths=(40,), scores="peaked", bmm1=bmm1, out="float32") for bmm1 in (0.3, 0.5, 1.0)),
            replace(SMALL, lengths=(60,), scores="one_hot", bmm1=10.0),
            replace(SMALL, lengths=(60,), scores="one_hot", bmm1=200.0, query="float16", cache="float16"),
            replace(SMALL, lengths=(60,), scores="one_hot", bmm1=-40.0),
        ),
    ),
    Property(
        "long rows",
        "many keys, many splits, empty splits and the last split all count",
        (
            uniform(SMALL, lengths=(1000, 1025), out="float32"),
            replace(SMALL, lengths=(1, 17, 128, 4096), heads=2, page_size=64),
            replace(SMALL, lengths=(256, 260, 264, 388, 452), q_len=8, heads=2, scores="equal", values="position", out="float32"),
            replace(SMALL, lengths=(3001,), heads=2, values="alternating", scores="equal", out="float32"),
            replace(SMALL, lengths=(2500,), heads=2, **E4M3),
        ),
    ),
    Property(
        "sparse lists",
        "the first min(n, K) token slots count, per query token, duplicates as often as they stand there",
        (
            *(uniform(SMALL, lengths=(5, 12), q_len=2, top_k=k, out="float32") for k in (1, 3, 8, 64)),
            *each(replace(SMALL, lengths=(60, 9), q_len=2, top_k=24, out="float32"), slots=("plain", "duplicates")),
            *(uniform(SMALL, lengths=(30, 8), top_k=30, slots="duplicates", out="float32", seed=seed) for seed in (0, 1)),
            *(replace(SMALL, lengths=(5, 12), q_len=3, top_k=24, tail="zero", seed=seed) for seed in (0, 1)),
            replace(SMALL, lengths=(300,), top_k=130, page_size=7),
        ),
    ),
    Property(
        "sparse holes",
        "negative slots and slots past the pool are skipped wherever they stand",
        (
            *each(replace(SMALL, lengths=(70, 9), q_len=2, top_k=64), slots=("holes", "front", "past", "all_holes")),
            *each(replace(SMALL, lengths=(70, 30), q_len=2, top_k=64, seed=3), slots=("holes", "past")),
            *each(uniform(SMALL, lengths=(40,), top_k=32, out="float32"), slots=("holes", "front", "past")),
            replace(SMALL, lengths=(70,), top_k=48, slots="front", **E4M3),
        ),
    ),
    Property(
        "second call",
        "a call leaves no trace in the next one of the same shape",
        (
            replace(SMALL, lengths=(37, 5), q_len=2),
            replace(SMALL, lengths=(9,), out="bfloat16", lse="flat", workspace="zeros"),
            replace(SMALL, lengths=(40, 9), top_k=12),
        ),
        judges.second_call_is_right,
    ),
    Property(
        "NaN that is seen",
        "a NaN in a visible key makes the rows that see it NaN, and no other",
        (
            replace(SMALL, lengths=(6, 9, 12), q_len=4),
            replace(SMALL, lengths=(40, 33), page_size=8),
            replace(SMALL, lengths=(9, 5), q_len=2, **E4M3),
        ),
        judges.visible_nan_stays_in_its_rows,
    ),
    Property(
        "far pages",
        "addresses beyond 32 bits are right",
        (
            Case(lengths=(70, 3), far_pages=58_300, tail="zero"),
            Case(lengths=(70, 3), far_pages=116_600, tail="zero"),
            Case(lengths=(70, 3), far_pages=116_600, query="float8_e4m3fn", cache="float8_e4m3fn", tail="zero"),
            Case(lengths=(70, 3), far_pages=58_300, top_k=32, tail="zero"),
        ),
        gpu_only=True,
    ),
    Property(
        "many rows",
        "seventy thousand requests are right",
        (Case(lengths=(2,) * 70_000, heads=2, page_size=2, tail="zero"),),
        judges.sampled_rows_are_right,
        gpu_only=True,
        variable=True,
    ),
)  # fmt: skip
