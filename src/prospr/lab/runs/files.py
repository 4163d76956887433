"""The files of a run as JSON, and a lock that a dead process does not keep."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from prospr.atomic import write_text
from prospr.errors import FolderError

__all__ = ["BusyError", "is_locked", "locked", "read_json", "sweep_up", "write_json"]

TRIES, PAUSE = 5, 0.02  # at a lock, in seconds: a look at it (`is_locked`) holds it for microseconds


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
    lock. On a network file system it holds for as many machines as the mount's locks do.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a+", encoding="utf-8") as file:
        for tries_left in reversed(range(1 if wait else TRIES)):
            if _flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)):
                break
            if not tries_left:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise BusyError(f"{path.parent}: {holder} is at work on this run; wait for it, or end it")
            time.sleep(PAUSE)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock `path` now; that it is looked at keeps nobody from taking it."""
    try:
        import fcntl

        with path.open("rb") as file:
            return not _flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (ImportError, FileNotFoundError):
        return False


def _flock(file: IO[Any], how: int) -> bool:
    """Whether the lock was had."""
    import fcntl

    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        raise FolderError(
            f"{file.name}: this file system gives no locks ({error.strerror}), which keep two processes from one run; "
            "put the folder on another, or mount it with locks (Lustre: -o flock)"
        ) from error
    return True
