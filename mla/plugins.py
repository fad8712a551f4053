"""Backends that other distributions offer through the entry point group `mla.backends`.

Discovery reads names only; a plug-in's module is imported when its backend is first needed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from mla.errors import BackendPluginWarning

GROUP = "mla.backends"

_TARGET = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<attr>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class Found:
    """An entry point that offers a backend."""

    name: str
    target: str
    distribution: str


def split_target(target: str) -> tuple[str, str]:
    """ "package.module:attr" as (module, attr)."""
    match = _TARGET.fullmatch(target.strip())
    if match is None:
        raise ValueError(f"target is {target!r}; expected 'module:attr', such as 'my_package.my_kernel:backend'")
    return match["module"], match["attr"]


def discover(built_in: Mapping[str, str]) -> list[Found]:
    """The plug-ins by distribution and name. A name that is taken is a warning with both sides; the first one stays."""
    taken = {name: (target, "mla") for name, target in built_in.items()}
    found = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: (_distribution(point), point.name)):
        distribution = _distribution(point)
        if point.name not in taken:
            taken[point.name] = (point.value, distribution)
            found.append(Found(point.name, point.value, distribution))
        elif taken[point.name][0] != point.value:
            target, owner = taken[point.name]
            warn(
                f"backend {point.name!r} is offered twice: by {owner} ({target}) and by {distribution} "
                f"({point.value}); the first is used"
            )
    return found


def warn(message: str) -> None:
    warnings.warn(message, BackendPluginWarning, stacklevel=2)


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed distribution"
