"""What a block did: every instruction in order, its operands and results, and its line in the kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from types import FrameType
from typing import Any

from mla.backends.xqa.instruction import INSTRUCTIONS

QUIET = frozenset({"thread_index", "thread_index_anew", "block_index"})
"""Instructions that tell nothing in a story."""


@dataclass(frozen=True)
class Event:
    """One instruction of the whole block.

    Attributes:
        name: of the instruction.
        path: the kernel's functions, from the kernel itself to the one that asked for it. line: where it stands there.
        operands: argument name -> vector [threads], plain number, or tuple of them.
        result: likewise, or None.
    """

    name: str
    path: tuple[str, ...]
    line: int
    operands: dict[str, Any] = field(repr=False)
    result: Any = field(repr=False)

    @property
    def function(self) -> str:
        return self.path[-1]

    def of_lane(self, lane: int, warp: int = 0) -> dict[str, Any]:
        """The operands and the result ("d") of one lane."""

        def pick(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(pick(part) for part in value)
            return value[warp * 32 + lane] if getattr(value, "ndim", 0) else value

        picked = {name: pick(value) for name, value in self.operands.items()}
        return picked if self.result is None else picked | {"d": pick(self.result)}


class Trace:
    """A list of events that fills as a block runs."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def watching(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """An instruction that leaves an event each time."""
        names = [argument for argument, _ in INSTRUCTIONS[name].arguments]

        def watched(*operands: Any) -> Any:
            result = run(*operands)
            caller = sys._getframe(1)
            frame: FrameType | None = caller
            path = []
            while frame is not None and frame.f_globals is caller.f_globals:  # a kernel's functions share their names
                path.append(frame.f_code.co_name)
                frame = frame.f_back
            given = dict(zip(names, operands, strict=True))
            self.events.append(Event(name, tuple(reversed(path)), caller.f_lineno, given, result))
            return result

        return watched

    def of(self, name: str, function: str | None = None) -> list[Event]:
        """The events of an instruction, all or those in one function of the kernel."""
        return [event for event in self.events if event.name == name and function in (None, event.function)]

    def chapters(self, depth: int = 3) -> list[tuple[str, dict[str, int]]]:
        """(function, instruction -> how often) in order, one for each stay in a function.

        Args:
            depth: functions deeper than this below the kernel count with the one that called them.
        """
        told = []
        for path, stay in groupby(self.events, key=lambda event: event.path[:depth]):
            counts: dict[str, int] = {}
            for event in stay:
                if event.name not in QUIET:
                    counts[event.name] = counts.get(event.name, 0) + 1
            told.append((path[-1], counts))
        return told

    def story(self, depth: int = 3) -> str:
        """The chapters as text: a line for each stay in a function of the kernel."""
        chapters = [(function, counts) for function, counts in self.chapters(depth) if counts]
        width = max((len(function) for function, _ in chapters), default=0)
        return "\n".join(
            f"{function:{width}}  " + ", ".join(f"{count} x {name}" for name, count in counts.items())
            for function, counts in chapters
        )
