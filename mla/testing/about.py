"""Where and with what something was judged or measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import mla


def about(device: str) -> dict[str, str]:
    """Versions, device, date and, in a git checkout of mla, the commit. Unknown things are left out.

    A tree that travelled without its history is told its commit by the environment variable MLA_COMMIT.
    """
    facts = {
        "mla": mla.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    for package in ("triton", "numba", "numba-cuda"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts["device"] = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    commit = os.environ.get("MLA_COMMIT") or _commit()
    return facts | ({"commit": commit} if commit else {})


def _commit() -> str | None:
    root = Path(mla.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    git = ["git", "-c", "safe.directory=*"]  # a checkout that travelled may belong to somebody else
    try:
        head, status = (
            subprocess.run([*git, *command], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if status else "")
