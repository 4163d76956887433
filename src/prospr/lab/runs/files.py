"""The files of a run as JSON, and a lock that a dead process does not keep."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prospr.atomic import write_text
from prospr.errors import FolderError

__all__ = ["BusyError", "is_locked", "locked", "read_json", "sweep_up", "write_json"]


class BusyError(FolderError):
    """Another process is at work on this run."""


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The table in a file that `write_json` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSON's and Unicode's are ValueErrors
        raise FolderError(
            f"{path}: the file is damaged ({error}); delete it, and what it held is made again"
        ) from error
    if not isinstance(content, dict):
        raise FolderError(f"{path}: the file is damaged (it holds no table); delete it, and what it held is made again")
    return content


def sweep_up(folder: Path) -> None:
    """Remove what a killed process left half written; call it with the lock held."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, wait: bool = False) -> Generator[None, None, None]:
    """Hold the lock `path`; without `wait`, an error where another process holds it.

    The operating system lets go of it when its holder dies, however that happens. Without fcntl (Windows) there is no
    lock.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise BusyError(f"{path.parent}: {holder} is at work on this run; wait for it, or end it") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock `path` now."""
    if not path.exists():
        return False
    try:
        with locked(path):
            return False
    except BusyError:
        return True
