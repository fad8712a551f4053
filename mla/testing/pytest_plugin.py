"""`pytest --mla-kernel module:attr`: the whole suite as tests of somebody's kernel, one test a case.

Loaded by pytest where mla is installed, or with `-p mla.testing.pytest_plugin`. Does nothing without the option.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mla", "judging an MLA decode kernel")
    group.addoption(
        "--mla-kernel", metavar="MODULE:ATTR", help="the function to judge; runs the suite of mla.testing on it"
    )
    group.addoption("--mla-profile", metavar="MODULE:ATTR", help="what it claims (a mla.testing.Profile)")
    group.addoption("--mla-backend", metavar="NAME", help="pass backend=NAME on, and take the profile from its claims")
    group.addoption("--mla-device", metavar="DEVICE", default="cpu", choices=("cpu", "cuda"), help="cpu or cuda")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--mla-kernel"):
        config.args[:] = [str(Path(__file__).with_name("conformance.py"))]
