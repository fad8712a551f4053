"""Float32 matrix products that are float32, whatever the process has allowed elsewhere (TF32, bf16 on some CPUs)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.RLock()  # the settings are the process's: two threads must not restore each other's


@contextmanager
def ieee_matmul() -> Iterator[None]:
    """Within the block float32 matrix products are IEEE float32 on every device; afterwards all is as it was."""
    with _lock:
        settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
        before = [setting.fp32_precision for setting in settings]
        for setting in settings:
            setting.fp32_precision = "ieee"
        try:
            yield
        finally:
            for setting, value in zip(settings, before, strict=True):
                setting.fp32_precision = value
