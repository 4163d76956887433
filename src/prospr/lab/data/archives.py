"""Unpack tar and zip archives that nobody has vouched for."""

from __future__ import annotations

import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from prospr.lab.data.errors import DataError

LIMIT = 4 * 2**30  # bytes; the largest set here unpacks to half a gigabyte
ENTRIES = 1_000_000
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
)


def unpack(archive: Path, folder: Path, limit: int = LIMIT) -> None:
    """Write the files of a tar (plain, gz, bz2, xz) or zip archive into `folder`.

    Only plain files and folders are written, below `folder` and nowhere else, each name once, with the permissions a
    new file has here: a link, a device, an absolute path, "..", or more than `limit` bytes in all is refused. The sizes
    that an archive claims are not believed.
    """
    try:
        entries = _zip_entries(archive) if zipfile.is_zipfile(archive) else _tar_entries(archive)
        written = 0
        for count, (name, file) in enumerate(entries):
            if count >= ENTRIES:
                raise DataError(f"{archive}: more than {ENTRIES} entries; refused")
            path = folder.joinpath(*_safe_parts(archive, name))
            if file is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with file, path.open("xb") as target:
                while block := file.read(1 << 18):
                    written += len(block)
                    if written > limit:
                        raise DataError(f"{archive}: unpacks to more than {limit} bytes; refused")
                    target.write(block)
    except FileExistsError as error:
        raise DataError(f"{archive}: {error.filename} is there twice; refused") from error
    except (*_DAMAGED, RuntimeError) as error:  # zipfile raises RuntimeError where a password is needed
        raise DataError(f"{archive}: damaged or not an archive ({error}); delete it and load again") from error


def _safe_parts(archive: Path, name: str) -> tuple[str, ...]:
    path = PurePosixPath(name)
    parts = path.parts
    if path.is_absolute() or ".." in parts or any(set(part) & set("\\:\0") for part in parts):
        raise DataError(f"{archive}: the entry {name!r} would leave the folder; refused")
    return parts


def _tar_entries(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            if not (member.isreg() or member.isdir()):
                raise DataError(f"{archive}: the entry {member.name!r} is a link or a device; refused")
            yield member.name, tar.extractfile(member) if member.isreg() else None


def _zip_entries(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise DataError(f"{archive}: the entry {member.filename!r} is a link or a device; refused")
            yield member.filename, None if member.is_dir() else file.open(member)
