"""`mla env` says what is here, and what cannot be found out; it never raises."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from typing import Any

import pytest
import torch

import mla
from mla.cli import env


def raising(*_: Any, **__: Any) -> Any:
    raise OSError("the disk is on fire")


def test_it_names_versions_packages_and_devices(run: Any) -> None:
    told = run("env")
    for word in (mla.__version__, platform.python_version(), torch.__version__, "CUDA_VISIBLE_DEVICES", "numba-cuda"):
        assert word in told
    assert "\ncpu " in told


def test_a_missing_package_is_a_row(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "PACKAGES", {"no-such-package": "no_such_module", "no-module-either": None})
    rows = {line.split()[0]: line.split()[1:] for line in run("env").splitlines() if line.startswith("no-")}
    assert rows == {"no-such-package": ["not", "installed", "no"], "no-module-either": ["not", "installed", "-"]}


def test_gpus_are_listed_with_capability_and_memory(run: Any, gpus: Any) -> None:
    gpus((9, 0), (12, 1))
    told = run("env").splitlines()
    assert told[-2].split() == ["cuda:0", "sm_90", "1.0", "GiB", "Claimed", "GPU", "0"]
    assert told[-1].split() == ["cuda:1", "sm_121", "2.0", "GiB", "Claimed", "GPU", "1"]


def test_a_gpu_that_fails_is_a_row_and_hides_no_other(run: Any, gpus: Any) -> None:
    gpus(RuntimeError("uncorrectable ECC error"), (8, 0))
    told = run("env").splitlines()
    assert told[-2].split(maxsplit=3) == ["cuda:0", "-", "-", "failed: RuntimeError: uncorrectable ECC error"]
    assert told[-1].startswith("cuda:1")


def test_a_driver_that_fails_is_a_row(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", raising)
    assert run("env").splitlines()[-1].split(maxsplit=3) == ["cuda", "-", "-", "failed: OSError: the disk is on fire"]


def test_cuda_is_not_started_where_it_is_not_available(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", raising)
    monkeypatch.setattr(torch.cuda, "get_device_properties", raising)
    assert "cuda:0" not in run("env")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (platform, "platform"),
        (platform, "python_version"),
        (platform, "processor"),
        (os, "cpu_count"),
        (torch, "get_num_threads"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_an_answer_that_fails_is_a_row(module: Any, name: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, raising)
    assert "failed: OSError: the disk is on fire" in run("env", "--style", "plain")


@pytest.mark.parametrize("name", ["version", "find_spec"])
def test_a_broken_package_is_a_row(name: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, name, raising)
    told = run("env", "--style", "plain")
    assert told.count("failed: OSError: the disk is on fire") >= 10


def test_memory_that_the_system_does_not_tell_is_a_dash(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    assert run("env").splitlines()[-1].split()[:3] == ["cpu", "-", "-"]


@pytest.mark.parametrize(
    ("hip", "cuda", "words"), [(None, None, "CPU only"), (None, "13.0", "CUDA 13.0"), ("7.1", None, "ROCm 7.1")]
)
def test_it_says_what_torch_was_built_for(
    hip: str | None, cuda: str | None, words: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert f"built for {words}" in run("env")


def test_looking_for_a_package_does_not_import_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "PACKAGES", {"nothing": "this"})
    sys.modules.pop("this", None)
    assert importlib.util.find_spec("this") is not None
    assert run("env").count("yes") == 1
    assert "this" not in sys.modules


def test_the_versions_are_those_of_the_installed_distributions(run: Any) -> None:
    installed = importlib.metadata.version("pytest")
    assert installed  # this suite runs on it
    assert env._version("pytest") == installed
