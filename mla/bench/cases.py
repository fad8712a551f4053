"""The cases: one decode call each, by name. The named table, real traffic, a case of one's own, and sweeps.

Names say the layout that a case stands for: `tp8` is 16 heads (128 over eight GPUs), `tp2` 64 heads, `dp` all 128;
`mtp2` is two query tokens per request.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.resources import files

DTYPES = ("bf16", "fp16", "fp8")
SWEEPS: dict[str, tuple[int, ...]] = {
    "length": tuple(1024 << i for i in range(8)),  # 1k ... 128k
    "batch": tuple(1 << i for i in range(11)),  # 1 ... 1024
    "q_len": tuple(range(1, 9)),
}
"""What each sweep goes through."""
RAGGED_SEED = (
    8  # of the one drawn case of the table; its total is as far from the expected one as that of older reports
)


@dataclass(frozen=True)
class BenchCase:
    """One decode call, without its tensors.

    Attributes:
        name: how it is asked for and reported.
        lengths: KV length of each request, its Q new tokens included; B is their number.
        heads, q_len, page_size: H, Q, P.
        dtype: of query and cache: "bf16", "fp16" or "fp8" (e4m3). The output is bf16 always.
        top_k: K, or 0 for dense. All query tokens of a request have the same list.
        sweep: the axis of the sweep that it belongs to, or "".
        scaled: whether its sizes were cut down for a quick run.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    q_len: int = 1
    page_size: int = 64
    dtype: str = "bf16"
    top_k: int = 0
    sweep: str = ""
    scaled: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; expected one of {', '.join(DTYPES)}")
        sizes = {"heads": self.heads, "q_len": self.q_len, "page_size": self.page_size, "batch": self.batch}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; expected 0 or more")
        if min(self.lengths) < self.q_len:
            raise ValueError(f"a length is {min(self.lengths)}; expected at least q_len, {self.q_len}")

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def ragged(self) -> bool:
        """Whether the lengths differ."""
        return len(set(self.lengths)) > 1

    @property
    def axis_value(self) -> int | None:
        """Where the case stands on its sweep's axis."""
        return {"length": self.longest, "batch": self.batch, "q_len": self.q_len}.get(self.sweep)

    def visible(self, request: int, token: int) -> int:
        """How many keys a query token sees: the mask is aligned at the end, and a list ends after K."""
        n = self.lengths[request] - self.q_len + token + 1
        return min(n, self.top_k) if self.top_k else n


def _drawn_lengths() -> tuple[int, ...]:
    """128 lengths between 1k and 8k; the first is the longest."""
    dice = random.Random(RAGGED_SEED)
    return (8192, *(dice.randint(1024, 8192) for _ in range(127)))


def named_cases() -> dict[str, BenchCase]:
    """Every case that has a name, in the order of reports."""
    tp8, tp2, dp = 16, 64, 128
    cases = [
        BenchCase("tp8_b1_4k", (4096,), tp8),
        BenchCase("tp8_b1_32k", (32768,), tp8),
        BenchCase("tp8_b32_4k", (4096,) * 32, tp8),
        BenchCase("tp8_b128_8k", (8192,) * 128, tp8),
        BenchCase("tp8_b64_8k_mtp2", (8192,) * 64, tp8, q_len=2),
        BenchCase("tp8_b64_8k_mtp4", (8192,) * 64, tp8, q_len=4),
        BenchCase("tp2_b64_8k", (8192,) * 64, tp2),
        BenchCase("dp_b1_4k", (4096,), dp),
        BenchCase("dp_b1_128k", (131072,), dp),
        BenchCase("dp_b32_4k", (4096,) * 32, dp),
        BenchCase("dp_b128_4k", (4096,) * 128, dp),
        BenchCase("dp_b128_8k_ragged", _drawn_lengths(), dp),
        BenchCase("dp_b64_8k_mtp2", (8192,) * 64, dp, q_len=2),
        BenchCase("fp8_tp8_b128_8k", (8192,) * 128, tp8, dtype="fp8"),
        BenchCase("fp8_dp_b128_4k", (4096,) * 128, dp, dtype="fp8"),
        BenchCase("sparse2k_dp_b64_16k", (16384,) * 64, dp, top_k=2048),
        BenchCase("sparse2k_dp_b128_16k", (16384,) * 128, dp, top_k=2048),
        BenchCase("sparse2k_dp_b64_16k_mtp2", (16384,) * 64, dp, q_len=2, top_k=2048),
    ]
    traffic = real_traffic()
    cases += [
        BenchCase(f"real_{layout}_{slots}", snapshots[0], heads)
        for layout, heads in (("tp8", tp8), ("dp", dp))
        for slots, snapshots in traffic.items()
    ]
    return {case.name: case for case in cases}


def real_traffic() -> dict[str, tuple[tuple[int, ...], ...]]:
    """KV lengths of decode steps of real serving traffic: "b16", "b64" or "b256" -> eight snapshots."""
    text = (files("mla.bench") / "data" / "decode_batches.json").read_text()
    return {slots: tuple(map(tuple, snapshots)) for slots, snapshots in json.loads(text).items()}


def choose(patterns: Iterable[str]) -> list[BenchCase]:
    """The named cases that the patterns name, each once, in the order of the table. A pattern may hold * and ?.

    Raises:
        ValueError: a pattern names no case.
    """
    known, chosen = named_cases(), set()
    for pattern in patterns:
        found = {name for name in known if fnmatchcase(name, pattern)}
        if not found:
            raise ValueError(f"no case is named {pattern!r}; the cases are {', '.join(known)}")
        chosen |= found
    return [case for name, case in known.items() if name in chosen]


def own_case(
    lengths: tuple[int, ...],
    batch: int,
    heads: int,
    q_len: int = 1,
    page_size: int = 64,
    dtype: str = "bf16",
    top_k: int = 0,
    ragged: bool = False,
) -> BenchCase:
    """A case that is described instead of named.

    Args:
        lengths: one for all requests, or one for each.
        ragged: draw each length between an eighth of the one given and itself; the first request keeps it.

    Raises:
        ValueError: the numbers make no call.
    """
    if len(lengths) not in (1, batch) or (ragged and len(lengths) > 1):
        expected = "1 when they are drawn" if ragged else f"1 or the batch, {batch}"
        raise ValueError(f"{len(lengths)} lengths are given; expected {expected}")
    each = lengths if len(lengths) == batch else lengths * batch
    if ragged:
        dice, longest = random.Random(batch), lengths[0]
        each = (longest, *(dice.randint(max(q_len, longest // 8), longest) for _ in range(batch - 1)))
    words = ["own", f"b{batch}", f"h{heads}", f"q{q_len}", f"n{max(lengths)}"]
    words += ["ragged"] if len(set(each)) > 1 else []
    words += [dtype] if dtype != "bf16" else []
    words += [f"p{page_size}"] if page_size != 64 else []
    words += [f"top{top_k}"] if top_k else []
    return BenchCase("_".join(words), each, heads, q_len, page_size, dtype, top_k)


def sweep(axis: str, base: BenchCase) -> list[BenchCase]:
    """The cases along an axis of `SWEEPS`: all else is as in `base`, whose first length counts.

    Raises:
        ValueError: the axis is unknown, or a case would make no call.
    """
    if axis not in SWEEPS:
        raise ValueError(f"sweep is {axis!r}; expected one of {', '.join(SWEEPS)}")
    length, made = base.lengths[0], []
    for value in SWEEPS[axis]:
        each = value if axis == "length" else length
        batch = value if axis == "batch" else base.batch
        q_len = value if axis == "q_len" else base.q_len
        case = own_case((each,), batch, base.heads, q_len, base.page_size, base.dtype, base.top_k)
        made.append(replace(case, name=f"{axis}{case.name.removeprefix('own')}", sweep=axis))
    return made


def scaled_down(case: BenchCase) -> BenchCase:
    """The same shape of work in a size for a CPU: lengths / 64, batch and top-k / 32, at most 16 heads."""
    kept = case.lengths[: max(1, case.batch // 32)]
    return replace(
        case,
        lengths=tuple(max(case.q_len, -(-length // 64)) for length in kept),
        heads=min(case.heads, 16),
        top_k=-(-case.top_k // 32),
        scaled=True,
    )
