"""What a planted fault is, what a case must have for it to matter, and how one is entered into the list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mla.testing.case import Case
from mla.testing.emulate import Kernel
from mla.testing.judges import right_answer
from mla.testing.properties import Judge
from mla.testing.suite import outcome

Faulty = TypeVar("Faulty", bound=type[Kernel])

HOLEY = ("holes", "past", "front", "all_holes")
NEEDS: dict[str, Callable[[Case], bool]] = {
    "dense": lambda case: case.top_k == 0,
    "sparse": lambda case: case.top_k > 0,
    "one token": lambda case: case.q_len == 1,
    "several tokens": lambda case: case.q_len > 1,
    "several requests": lambda case: case.batch > 1,
    "several pages": lambda case: any(length > case.page_size for length in case.lengths),
    "pages not of 64": lambda case: case.page_size != 64,
    "several heads": lambda case: case.heads > 1,
    "heads not in sixteens": lambda case: case.heads % 16 != 0,
    "more than 16 heads": lambda case: case.heads > 16,
    "no request": lambda case: case.batch == 0,
    "empty row": lambda case: any(case.visible(b, 0) == 0 for b in range(case.batch)) or case.slots in HOLEY,
    "unread memory": lambda case: case.unread != "zero",
    "holes": lambda case: case.slots in HOLEY,
    "negative holes": lambda case: case.slots in ("holes", "front", "all_holes"),
    "slots past the pool": lambda case: case.slots == "past",
    "duplicates": lambda case: case.slots == "duplicates",
    "list longer than needed": lambda case: (
        case.top_k > 0 and any(case.visible(b, 0) < case.top_k for b in range(case.batch))
    ),
    "strided query": lambda case: case.query_layout in ("wider", "transposed", "spread"),
    "strided cache": lambda case: case.cache_layout in ("layers", "every_second", "wider"),
    "pages apart": lambda case: case.cache_layout in ("layers", "every_second"),
    "wide cache rows": lambda case: case.cache_layout == "wider",
    "unaligned cache": lambda case: case.cache_layout == "offset" or case.cache == "float8_e4m3fn",
    "strided table": lambda case: case.table_layout != "packed",
    "spread table": lambda case: case.table_layout == "spread",
    "strided out": lambda case: case.out is not None and case.out_layout in ("sliced", "transposed"),
    "given out": lambda case: case.out is not None,
    "out in 32 bits": lambda case: case.out == "float32",
    "out in fp16": lambda case: case.out == "float16",
    "given lse": lambda case: case.lse in ("flat", "rows", "transposed"),
    "strided lse": lambda case: case.lse in ("flat", "transposed"),
    "lse": lambda case: case.lse != "none",
    "lse in base e": lambda case: case.lse != "none" and case.lse_base == "basee",
    "lse in base 2": lambda case: case.lse != "none" and case.lse_base == "base2",
    "int64 tables": lambda case: case.tables == "int64",
    "int64 lengths": lambda case: case.lens == "int64",
    "sinks": lambda case: case.sinks != "none",
    "sinks in a list": lambda case: case.sinks == "listed",
    "sinks that are off": lambda case: case.sinks == "off",
    "e4m3 cache": lambda case: case.cache == "float8_e4m3fn",
    "fp16 cache": lambda case: case.cache == "float16",
    "wide query, e4m3 cache": lambda case: case.cache == "float8_e4m3fn" and case.query != case.cache,
    "cache of 16 bits or more": lambda case: case.cache != "float8_e4m3fn",
    "bmm1 not 1": lambda case: case.bmm1 != 1.0,
    "bmm1 not 1 / sqrt(192)": lambda case: case.bmm1 != Case.bmm1,
    "bmm2 not 1": lambda case: case.bmm2 != 1.0,
    "bmm1 below 0": lambda case: case.bmm1 < 0,
    "a scale of 0": lambda case: 0.0 in (case.bmm1, case.bmm2),
    "scale tensor": lambda case: case.scale_form != "float",
    "max_seq_len over 4096": lambda case: max([0, *case.lengths]) + case.max_slack > 4096,
    "workspace with contents": lambda case: case.workspace in ("ones", "noise"),
}
"""What a case must have for a fault to be visible, each with its test. Necessary, not sufficient."""


@dataclass(frozen=True)
class Fault:
    """A kernel with one thing wrong.

    Attributes:
        name: short and unique.
        family: the kind of mistake; faults of one family lie in one module.
        sentence: what it does wrong, in plain words.
        needs: keys of `NEEDS`; a case without one of them gets the right answer.
        make: a fresh kernel. Some faults remember earlier calls.
        shown_by: small cases on which it is wrong, each for itself.
        judge: the way of judging that shows it.
    """

    name: str
    family: str
    sentence: str
    needs: tuple[str, ...]
    make: Callable[[], Kernel]
    shown_by: tuple[Case, ...]
    judge: Judge = right_answer

    def concerns(self, case: Case) -> bool:
        """Whether the case has all that the fault needs. False means that it gets the right answer there."""
        return all(NEEDS[need](case) for need in self.needs)


FAULTS: dict[str, Fault] = {}
"""Every planted fault by name. The families fill it when `mla.testing.faults` is imported."""


def planted(
    family: str,
    name: str,
    sentence: str,
    *shown_by: Case,
    needs: tuple[str, ...] = (),
    judge: Judge = right_answer,
    **settings: Any,
) -> Callable[[Faulty], Faulty]:
    """A decorator that enters a kernel class into `FAULTS`.

    Args:
        family, name, sentence, shown_by, needs, judge: see `Fault`.
        settings: arguments of the kernel, `splits=4` for instance.

    Raises:
        ValueError: the name is taken, or a need is unknown.
    """
    if name in FAULTS:
        raise ValueError(f"the fault {name!r} is planted twice")
    for need in needs:
        if need not in NEEDS:
            raise ValueError(f"need is {need!r}; expected one of {', '.join(NEEDS)}")

    def enter(kernel: Faulty) -> Faulty:
        kernel.__doc__ = sentence
        FAULTS[name] = Fault(name, family, sentence, needs, partial(kernel, **settings), shown_by, judge)
        return kernel

    return enter


def judged_wrong(fault: Fault, case: Case, device: str = "cpu") -> bool:
    """Whether a fresh kernel with the fault is refused on a case, by the fault's own way of judging.

    That includes its values, the identity of given buffers and every byte that must not be written. An exception counts
    as a refusal.
    """
    return outcome(fault.judge, fault.make(), case, device) is not None
