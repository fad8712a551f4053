"""Which backends there are: ours, other distributions', and registered ones. Each is loaded when first needed."""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass, field
from typing import cast

from mla import plugins
from mla.backend import Backend
from mla.errors import BackendBroken

BUILT_IN = {
    "reference": "mla.reference:backend",
    "trtllm-gen": "mla.backends.trtllm_gen:backend",
    "xqa": "mla.backends.xqa:backend",
}
"""Our own backends, in the order in which tables list them."""


@dataclass
class _Entry:
    """One known name, and what became of loading it."""

    name: str
    source: str
    target: str | None
    backend: Backend | None = None
    broken: str | None = None
    cause: BaseException | None = field(default=None, repr=False)


@dataclass(frozen=True)
class BackendInfo:
    """One row of `mla.backends()`.

    Attributes:
        name: what to pass as `backend=`.
        source: "mla", the distribution that offers it, or "registered".
        target: the "module:attr" that it is loaded from, or None for a registered object.
        loaded: whether it has been loaded in this process.
        broken: why loading it failed, or None.
    """

    name: str
    source: str
    target: str | None
    loaded: bool
    broken: str | None


_lock = threading.RLock()
_entries: dict[str, _Entry] = {}  # empty until first asked for
_generation = [0]  # how often a name was registered


def register_backend(name: str, target: Backend | str, *, replace: bool = False) -> None:
    """Make a backend known as `backend=name`. "auto" never picks it: what "auto" may pick is a fixed table.

    Args:
        name: a non-empty string other than "auto".
        target: the backend itself (see `mla.Backend`), or "module:attr", imported on first use.
        replace: allow a name that is known already, and drop what stood there.

    Raises:
        TypeError: `name` is not a string, or `target` is neither a string nor has `name`, `why_not` and `run`.
        ValueError: the name is taken, reserved or empty, differs from `target.name`, or the string is no "module:attr".

    Example:
        A string is imported when it is first needed, so this succeeds although there is no such module:

        >>> register_backend("draft", "my_kernels.draft:backend")
        >>> backends()["draft"].source, backends()["draft"].loaded
        ('registered', False)
    """
    if not isinstance(name, str):
        raise TypeError(f"name is a {type(name).__name__}; expected a str")
    if not name or name == "auto":
        raise ValueError(f"name is {name!r}; expected a non-empty name other than 'auto'")
    if isinstance(target, str):
        plugins.split_target(target)
        entry = _Entry(name, "registered", target)
    else:
        _check_backend(name, target)
        entry = _Entry(name, "registered", None, backend=target)
    with _lock:
        known = _known()
        if name in known and not replace:
            raise ValueError(f"backend {name!r} is known already (from {known[name].source}); replace=True replaces it")
        known[name] = entry
        _generation[0] += 1


def generation() -> int:
    """Changes whenever a name may mean another backend than before."""
    return _generation[0]


def backends() -> dict[str, BackendInfo]:
    """Every known backend by name, ours first. Loads none of them and starts no GPU.

    Returns:
        name -> `BackendInfo`.

    Example:
        >>> list(backends())[:3]
        ['reference', 'trtllm-gen', 'xqa']
    """
    with _lock:
        return {
            entry.name: BackendInfo(entry.name, entry.source, entry.target, entry.backend is not None, entry.broken)
            for entry in _known().values()
        }


def load(name: str) -> Backend:
    """The backend of that name, loaded now if it was not yet.

    Raises:
        TypeError, ValueError: not a known name; the message lists the known ones.
        BackendBroken: it could not be loaded; the cause is attached.
    """
    with _lock:
        known = _known()
        if not isinstance(name, str):
            raise TypeError(f"backend is a {type(name).__name__}; expected a str: 'auto' or one of {', '.join(known)}")
        entry = known.get(name)
        if entry is None:
            raise ValueError(f"backend is {name!r}; expected 'auto' or one of the known backends: {', '.join(known)}")
        if entry.backend is None and entry.broken is None:
            _load(entry)
        if entry.backend is None:
            raise BackendBroken(f"backend {name!r} (from {entry.source}) is broken: {entry.broken}") from entry.cause
        return entry.backend


def _known() -> dict[str, _Entry]:
    """All entries. The first call reads other distributions' entry points: their names, no module is imported."""
    if not _entries:
        _entries.update({name: _Entry(name, "mla", target) for name, target in BUILT_IN.items()})
        _entries.update({f.name: _Entry(f.name, f.distribution, f.target) for f in plugins.discover(BUILT_IN)})
    return _entries


def _load(entry: _Entry) -> None:
    try:
        module_name, attribute = plugins.split_target(cast(str, entry.target))
        loaded = getattr(importlib.import_module(module_name), attribute)
        _check_backend(entry.name, loaded)
    except Exception as error:  # importing somebody's toolchain may raise anything; it is kept, reported and re-raised
        entry.broken = f"loading {entry.target} raised {type(error).__name__}: {error}"
        entry.cause = error
        plugins.warn(f"backend {entry.name!r} (from {entry.source}) is broken: {entry.broken}")
    else:
        entry.backend = loaded


def _check_backend(name: str, backend: object) -> None:
    missing = [part for part in ("name", "why_not", "run") if not hasattr(backend, part)]
    if missing:
        raise TypeError(f"backend {name!r} is a {type(backend).__name__} without {', '.join(missing)}; see mla.Backend")
    own_name = cast(Backend, backend).name
    if own_name != name:
        raise ValueError(f"backend {name!r} calls itself {own_name!r}; expected the same name")
