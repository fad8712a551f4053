"""What the emulator finds."""

from __future__ import annotations


class EmulatorError(AssertionError):
    """A kernel does something that a GPU would punish, now or some day.

    Attributes:
        kind: "bounds", "alignment", "read-only", "two blocks", "unfinished copy", "race", "divergence", "range" or
            "division".
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
