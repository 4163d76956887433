"""Where and with what a run was made."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import prospr

__all__ = ["environment", "now"]

PACKAGES = ("torch", "safetensors", "numpy")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, machine, device, command and git revision, as plain values.

    >>> environment(torch.device("cpu"))["device"]
    'cpu'
    """
    versions = {"prospr": prospr.__version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in PACKAGES}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "versions": versions,
        "git": _revision(),
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {platform.node()}",
        "command": shlex.join(sys.argv),
        "when": now(),
    }


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _revision() -> str | None:
    """The commit of the source that runs, with a + where files differ from it; None for an installed package."""
    home = Path(prospr.__file__).parent
    try:
        commit = _git(home, "rev-parse", "HEAD")
        tracked = _git(home, "ls-files", "--error-unmatch", "__init__.py")  # not a .venv inside another repository
        return commit + ("+" if tracked and _git(home, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
