"""What an entry of `isa.py` is: a name, its operands' types, and PTX that becomes inline assembly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

F32: TypeAlias = Any
U32: TypeAlias = Any
I32: TypeAlias = Any
I64: TypeAlias = Any
U16: TypeAlias = Any
F2: TypeAlias = Any
F4: TypeAlias = Any
U2: TypeAlias = Any
U4: TypeAlias = Any

REGISTERS = {"F32": ("f", 1), "U32": ("r", 1), "I32": ("r", 1), "I64": ("l", 1), "U16": ("h", 1)}
REGISTERS |= {"F2": ("f", 2), "F4": ("f", 4), "U2": ("r", 2), "U4": ("r", 4)}
"""Type -> (letter of the register class in inline assembly, how many registers)."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: as kernels call it.
        arguments: (name, type) of each.
        result: its type, or None.
        ptx: the text with `<d>` for the result and `<argument>`; tuples expand to `{...}`, and `<d0>` is one of them.
        effect: it does something besides its result (memory, barriers), so it stays where it is written.
    """

    name: str
    arguments: tuple[tuple[str, str], ...]
    result: str | None
    ptx: str
    effect: bool

    def assembly(self) -> tuple[str, str]:
        """(text, constraints) for inline assembly: operands as $0, $1, ..., the result first."""
        operands: dict[str, str] = {}
        constraints: list[str] = []

        def place(name: str, kind: str, prefix: str) -> None:
            letter, count = REGISTERS[kind]
            numbered = [f"${len(constraints) + i}" for i in range(count)]
            operands[name] = numbered[0] if count == 1 else "{" + ", ".join(numbered) + "}"
            operands.update({f"{name}{i}": one for i, one in enumerate(numbered)})
            constraints.extend([prefix + letter] * count)

        if self.result is not None:
            place("d", self.result, "=")
        for name, kind in self.arguments:
            place(name, kind, "")
        if self.effect:
            constraints.append("~{memory}")
        return re.sub(r"<(\w+)>", lambda found: operands[found[1]], self.ptx), ",".join(constraints)


INSTRUCTIONS: dict[str, Instruction] = {}
"""Every instruction, by name."""


def instruction(ptx: str, *, effect: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function's name and annotated types, with this PTX, into `INSTRUCTIONS`."""

    def enter(stub: Callable[..., Any]) -> Callable[..., Any]:
        types = {name: str(kind) for name, kind in stub.__annotations__.items()}
        result = types.pop("return")
        name = stub.__name__
        INSTRUCTIONS[name] = Instruction(name, tuple(types.items()), None if result == "None" else result, ptx, effect)
        return by_hand(stub)

    return enter


def by_hand(stub: Callable[..., Any]) -> Callable[..., Any]:
    """A name that has no PTX of its own: each machine binds it. Called as it is, it says so."""

    @wraps(stub)
    def elsewhere(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError(f"{stub.__name__} runs on a GPU or in the emulator: see mla.backends.xqa.specialize")

    return elsewhere
