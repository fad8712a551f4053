"""Matrix products in the precision that was asked for, whatever the process has allowed elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_lock = threading.RLock()  # the settings are the process's: two threads must not restore each other's


@contextmanager
def ieee_matmul(device: torch.device) -> Iterator[None]:
    """Within the block float32 matrix products are IEEE float32; afterwards all is as it was.

    Off are TF32, the bf16 products of some CPUs, and autocast, which would round the operands.
    """
    autocast = torch.amp.autocast_mode.is_autocast_available(device.type)
    with _lock, torch.autocast(device.type, enabled=False) if autocast else nullcontext():
        settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
        before = [setting.fp32_precision for setting in settings]
        for setting in settings:
            setting.fp32_precision = "ieee"
        try:
            yield
        finally:
            for setting, value in zip(settings, before, strict=True):
                setting.fp32_precision = value
