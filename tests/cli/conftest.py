"""Machines that are not here: GPUs that PyTorch only claims to see."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from mla import problem
from mla.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """run("backends", "--sinks") -> what it printed; the exit status was 0."""

    def run_main(*arguments: str) -> str:
        assert main(arguments) == 0
        return capsys.readouterr().out

    return run_main


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """gpus((9, 0), RuntimeError("...")): one claimed GPU per argument, of that capability or raising that error."""

    def claim(*found: tuple[int, int] | Exception) -> None:
        def properties(index: int) -> SimpleNamespace:
            gpu = found[index]
            if isinstance(gpu, Exception):
                raise gpu
            return SimpleNamespace(name=f"Claimed GPU {index}", total_memory=(index + 1) << 30)

        def capability(device: torch.device) -> tuple[int, int]:
            gpu = found[device.index]
            assert not isinstance(gpu, Exception)
            return gpu

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(problem, "_capability_of", capability)

    return claim
