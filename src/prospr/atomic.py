"""Files that appear whole or not at all."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path

__all__ = ["write", "write_text"]


def write(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a temporary file beside `path`, and give it that name once it is on the disk.

    Where `path` is a link, what it leads to is written; a device or a pipe, such as /dev/null, is written to as it is.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    if path.exists() and not path.is_file() and not path.is_dir():
        fill(path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # not tempfile's, which nobody else may read
    try:
        fill(temporary)
        with temporary.open("rb+") as file:  # to the disk, not only to the operating system
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _flush_folder(path: Path) -> None:
    """The new name too; where folders cannot be opened (Windows), the operating system sees to it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
