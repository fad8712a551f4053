"""Says whether an answer to an exercise is right, and never what the right answer is.

    check("02-slot", 17)     a number, a word or a list: its fingerprint is compared
    check("04-merge", merge) a function: it is run on random inputs next to one that is known to be right

Numbers and words are kept as fingerprints only. What is known about a function has to stand here: look later.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

# The oracle of notebook 12 makes failing cases small with hypothesis, which would leave a folder beside the notebooks.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(tempfile.gettempdir(), "mla-notebooks-hypothesis"))

RIGHT = "right"
OPEN = "not answered yet: put your answer where None stands, and run the cell again"


def check(name: str, answer: Any) -> None:
    """Print whether `answer` is right for the exercise `name`."""
    print(f"{name}: {verdict(name, answer)}")


def verdict(name: str, answer: Any) -> str:
    """RIGHT, OPEN, or a sentence that begins with "wrong"."""
    if name not in FINGERPRINTS and name not in FUNCTIONS:
        raise ValueError(f"name is {name!r}; expected one of {', '.join([*FINGERPRINTS, *FUNCTIONS])}")
    if answer is None:
        return OPEN
    if name in FINGERPRINTS:
        same = fingerprint(name, answer) == FINGERPRINTS[name]
        return RIGHT if same else f"wrong: it is not {written(answer)}"
    if not callable(answer):
        return f"wrong: it is a {type(answer).__name__}; expected a function"
    try:
        return FUNCTIONS[name](answer)
    except _NotAnswered:
        return OPEN
    except Exception as error:  # a student's function may raise anything
        return f"wrong: it raised {type(error).__name__}: {error}"


def written(answer: Any) -> str:
    """One way to write each answer: 3.0 is 3, words have no capitals, tensors and tuples are lists."""
    if isinstance(answer, torch.Tensor):
        answer = answer.tolist()
    if isinstance(answer, list | tuple):
        return f"[{', '.join(map(written, answer))}]"
    if isinstance(answer, bool | str):
        return str(answer).strip().lower()
    return f"{float(answer):.10g}"


def fingerprint(name: str, answer: Any) -> str:
    """Sixteen hexadecimal digits from which nobody sees the answer."""
    return hashlib.sha256(f"{name}: {written(answer)}".encode()).hexdigest()[:16]


class _NotAnswered(Exception):
    """The function returned None."""


def _called(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    result = function(*arguments, **named)
    if result is None:
        raise _NotAnswered
    return result


def _same(function: Callable[..., Any], known: Callable[..., Any], draws: list[tuple[Any, ...]]) -> str:
    """Run both on each of `draws` and compare; the message shows the inputs when they are short."""
    for draw in draws:
        got = _called(function, *(x.clone() if isinstance(x, torch.Tensor) else x for x in draw))
        want = known(*draw)
        got, want = (part if isinstance(part, tuple) else (part,) for part in (got, want))
        if len(got) != len(want):
            return f"wrong: it returns {len(got)} things; expected {len(want)}"
        for pair in zip(got, want, strict=True):
            a, b = (torch.as_tensor(one, dtype=torch.float64) for one in pair)
            if a.shape != b.shape:
                return f"wrong: a result has shape {list(a.shape)}; expected {list(b.shape)}"
            if not torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True):
                short = all(not isinstance(x, torch.Tensor) or x.numel() <= 6 for x in draw)
                shown = f" for {', '.join(map(_show, draw))}" if short else ""
                return f"wrong: the numbers are not right{shown}"
    return RIGHT


def _show(x: Any) -> str:
    return str(x.tolist()) if isinstance(x, torch.Tensor) else repr(x)


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _absorb(function: Callable[..., Any]) -> str:
    """(q_nope [H, n], w_k [H, n, r]) -> the query that meets latents, [H, r]: held to what it must do to a score."""
    q, w, c = _random(3, 8, seed=1), _random(3, 8, 5, seed=2), _random(5, seed=3)
    got = torch.as_tensor(_called(function, q, w))
    if tuple(got.shape) != (3, 5):
        return f"wrong: the result has shape {list(got.shape)}; expected [3, 5], that is [heads, latent]"
    scores = (q * (w @ c)).sum(-1)
    return RIGHT if torch.allclose(got @ c, scores) else "wrong: its product with a latent is not q . (W_K c)"


def _slot(function: Callable[..., Any]) -> str:
    tables = torch.tensor([[3, 1, -1], [0, 4, 2]])
    draws = [(tables, b, j, p) for p in (4, 7) for b, j in ((0, 0), (0, p), (1, 2 * p + 1), (1, p - 1))]

    def known(tables: torch.Tensor, b: int, j: int, page_size: int) -> int:
        column, offset = divmod(j, page_size)
        return int(tables[b, column]) * page_size + offset

    return _same(function, known, draws)


def _merge(function: Callable[..., Any]) -> str:
    import mla

    draws = []
    for seed in range(4):
        out_a, out_b = _random(2, 8, seed=seed), _random(2, 8, seed=seed + 10)
        draws.append((out_a, 300.0 * _random(2, seed=seed + 20), out_b, 300.0 * _random(2, seed=seed + 30)))
    draws.append((draws[0][0], draws[0][1], torch.zeros(2, 8), torch.full((2,), -math.inf, dtype=torch.float64)))
    double = [tuple(x.double() for x in draw) for draw in draws]
    found = _same(function, lambda *state: mla.merge_state(*state, lse_base="base2"), double)
    return found if found == RIGHT else f"{found} (states may be far apart, and one may be empty)"


def _visible(function: Callable[..., Any]) -> str:
    draws = [(n, q, t) for n in (0, 1, 2, 9) for q in (1, 3, 4) for t in range(q)]
    return _same(function, lambda length, q_len, t: len(range(length - q_len + t + 1)), draws)


def _counted(function: Callable[..., Any]) -> str:
    """(entries, n, pool) -> the slots that count."""
    draws = [
        ([5, -1, 2, 2, 9], 4, 12),
        ([5, -1, 2, 2, 9], 9, 12),
        ([12, 11, -7, 0], 3, 12),
        ([1, 2, 3], 0, 12),
        ([-1, -1, 4], 2, 12),
    ]

    def known(entries: list[int], n: int, pool: int) -> list[int]:
        return [slot for slot in entries[:n] if slot in range(pool)]

    for draw in draws:
        got = list(_called(function, *draw))
        if got != known(*draw):
            return f"wrong: {got} for entries {draw[0]}, n = {draw[1]}, a pool of {draw[2]} slots"
    return RIGHT


def _quantize(function: Callable[..., Any]) -> str:
    """x -> (e4m3 tensor, scale)."""
    import mla

    for seed, size in ((1, 1.0), (2, 1e4), (3, 1e-3)):
        x = size * _random(40, seed=seed).float()
        got = _called(function, x)
        if not isinstance(got, tuple) or len(got) != 2:
            return "wrong: expected (e4m3 tensor, scale)"
        stored, scale = got
        if stored.dtype is not torch.float8_e4m3fn:
            return f"wrong: the first result is {stored.dtype}; expected torch.float8_e4m3fn"
        best, best_scale = mla.quantize_e4m3(x)
        error = float((stored.float() * float(scale) - x).abs().max())
        allowed = 1.01 * float((best.float() * best_scale - x).abs().max())
        if not error <= allowed:
            return f"wrong: numbers up to {float(x.abs().max()):.3g} come back off by up to {error:.3g}"
    return RIGHT


def _mean(function: Callable[..., Any]) -> str:
    draws = []
    for seed, n in enumerate((8, 13, 1)):
        x = _random(24, 64, seed=seed).float()
        x[n:] = math.nan
        draws.append((x, n))
    return _same(function, lambda x, n: x[:n].mean(0), draws)


def _owner(function: Callable[..., Any]) -> str:
    from mla.backends.xqa.emulator.picture import owners

    def known(row: int, column: int) -> tuple[int, int]:
        lane, register = owners("C")[row][column].split(":c")
        return int(lane), int(register)

    return _same(function, known, [(row, column) for row in range(16) for column in range(8)])


def _kernel(function: Callable[..., Any]) -> str:
    """A whole call, held to the contract by the oracle on a few cases."""
    from mla.testing import Case, Mismatch, assert_close, build

    for case in KERNEL_CASES:
        call = build(Case(**case))
        try:
            assert_close(_called(function, **call.arguments), call.problem)
        except Mismatch as mismatch:
            return f"wrong: on {call.case}, {mismatch}"
    return RIGHT


KERNEL_CASES: tuple[dict[str, Any], ...] = (
    dict(lengths=(1, 9), heads=3, page_size=4, lse="none"),
    dict(lengths=(6, 11), q_len=3, heads=3, page_size=4, lse="none"),
    dict(lengths=(2, 7), q_len=4, heads=2, page_size=8, lse="none"),
)

FUNCTIONS: dict[str, Callable[[Callable[..., Any]], str]] = {
    "01-absorb": _absorb,
    "02-slot": _slot,
    "04-merge": _merge,
    "05-visible": _visible,
    "06-counted": _counted,
    "07-quantize": _quantize,
    "08-mean": _mean,
    "09-owner": _owner,
    "12-several": _kernel,
}

FINGERPRINTS: dict[str, str] = {
    "01-bytes": "1c14344701f38a34",
    "01-ratio": "21e2edcfdd9a1634",
    "01-position": "00d0613020d1dc9e",
    "02-slot-of-8": "5a360430fe570514",
    "02-pages": "06be5ed3a71f72f6",
    "02-waste": "e41e3986cd9e0ffb",
    "03-scaled": "8e9292abb98071ee",
    "03-sink": "3b9445d8078d562e",
    "03-lse": "7eed60e7a2eebec8",
    "03-list": "684ae9b8bd430791",
    "04-two-parts": "fd7d4960a495e544",
    "04-weights": "e3ad413b1ff202d0",
    "04-sink": "8107ebccd1b118f1",
    "05-first": "e113b0c8b2f8adba",
    "05-length": "7911698661baa48d",
    "05-blocks": "fd7b605bfdf7388d",
    "06-entry": "64983c5f39fb1400",
    "06-mean": "8a0f9064fd18670d",
    "06-sink": "1cc0551ecc7b3b20",
    "07-saturated": "ccfc641e3e92702c",
    "07-bmm2": "79c483548ececc3a",
    "07-exact": "33995e6063da5f09",
    "08-programs": "95948b99716189f1",
    "08-loads": "33133bd0466be384",
    "08-address": "6841894fa68c4eff",
    "09-lane": "1dc195598652eb4f",
    "09-products": "c90254401eda0c63",
    "09-registers": "606a22e2048b4ae9",
    "10-A": "f6ead34a4148bb8d",
    "10-B": "d24ea9c5369da0ba",
    "10-C": "0722cb34617a4d76",
    "10-D": "d12d4c366cd4c8f8",
    "10-E": "6cd11aca712678a7",
    "10-F": "2edb6f51bfd95efb",
    "10-G": "c73925ba9a6d9ac6",
    "10-H": "972959aac36314f5",
    "11-corner": "9e7bf1e02c7deae4",
    "11-limit": "dbfcf6ad60c3a233",
    "11-limit-of-two": "a4935f58eb3b869f",
    "11-floor": "cbd62f4ee44ab66e",
    "12-auto": "c43e09c099972f4c",
    "12-refused": "273a897047ca55e4",
}
