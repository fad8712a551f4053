"""The errors and warnings of `mla` that Python has no name for.

Bad arguments are plain `ValueError` (shapes, ranks, sizes, names, devices) and `TypeError` (dtypes, kinds). What
follows is about backends. Two words are kept apart in every message: a backend *refuses* a problem that it was not
made for, and a backend is *broken* when it cannot even be loaded or asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class BackendUnsupported(ValueError):
    """A legal problem that the chosen backend (or, under "auto", every backend) refuses.

    Attributes:
        reasons: backend name -> every reason it gave, each a full sentence.
    """

    def __init__(self, asked_for: str, reasons: Mapping[str, Sequence[str]]) -> None:
        self.reasons: dict[str, tuple[str, ...]] = {name: tuple(why) for name, why in reasons.items()}
        lines = [f"no backend for this problem (backend={asked_for!r}):"]
        for name, why in self.reasons.items():
            lines += [f"  {name} refused: {sentence}" for sentence in why]
        super().__init__("\n".join(lines))


class BackendBroken(RuntimeError):
    """A backend that was asked for by name and cannot be loaded, or fails while being asked whether it can run."""


class BackendPluginWarning(UserWarning):
    """A backend that another distribution offers is broken, or its name is taken; the message names both sides."""


class ReferenceFallbackWarning(UserWarning):
    """backend="auto" fell to the reference on a GPU: right, but an oracle and not a kernel. Given once per device."""
