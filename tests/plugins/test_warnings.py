"""The package's own warnings are errors in this suite: pyproject.toml knows them by their first word."""

from __future__ import annotations

import warnings

import pytest

import mla
from mla import plugins


def test_a_plugin_warning_that_no_test_expects_is_an_error() -> None:
    with pytest.raises(mla.BackendPluginWarning):
        plugins.warn("backend 'sevens' is broken")


def test_a_fallback_warning_that_no_test_expects_is_an_error() -> None:
    with pytest.raises(mla.ReferenceFallbackWarning):
        warnings.warn("backend='auto' runs the reference", mla.ReferenceFallbackWarning, stacklevel=1)
