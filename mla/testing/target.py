"""Finding the kernel that somebody names on a command line, and what it claims."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from mla import registry
from mla.plugins import split_target
from mla.testing.profile import Profile
from mla.testing.properties import Function
from mla.testing.suite import with_backend


def load(target: str, backend: str | None = None, profile: str | None = None) -> tuple[Function, Profile]:
    """(function, profile) of "module:attr".

    The module is looked for in the current folder, too. The profile is the one named by `profile` ("module:attr"), or
    what the backend named by `backend` claims, or the attribute `profile` beside the function, or the whole contract.

    Raises:
        ValueError: a target is no "module:attr", or the backend is unknown.
        ImportError, AttributeError: a module or attribute is not there.
        TypeError: the attribute cannot be called, or the profile is no `Profile`.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    function = _attribute(target)
    if not callable(function):
        raise TypeError(f"{target} is a {type(function).__name__}; expected a function with the arguments of the call")
    claimed = _attribute(profile) if profile else _profile_beside(target, backend)
    if not isinstance(claimed, Profile):
        raise TypeError(
            f"{profile or target}: the profile is a {type(claimed).__name__}; expected a mla.testing.Profile"
        )
    return with_backend(function, backend), claimed


def _profile_beside(target: str, backend: str | None) -> Any:
    if backend is not None:
        claimed = getattr(registry.load(backend), "capabilities", None)
        return Profile() if claimed is None else Profile.of(claimed)
    module, _ = split_target(target)
    return getattr(importlib.import_module(module), "profile", Profile())


def _attribute(target: str) -> Any:
    module, name = split_target(target)
    return getattr(importlib.import_module(module), name)
