"""Download one file: whole or not at all, checked, and taken up where it was cut."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

from prospr.lab.data.errors import DownloadError
from prospr.lab.progress import Report

CHUNK = 1 << 18
TIMEOUT = 30.0
ATTEMPTS = 4


class _Cut(Exception):
    """The connection ended before the file did, or the server was busy: worth another try."""


def download(
    url: str,
    path: Path,
    checksum: str | None = None,
    *,
    report: Report | None = None,
    timeout: float = TIMEOUT,
    attempts: int = ATTEMPTS,
) -> Path:
    """Bring `url` to `path`.

    What has arrived is in `<path>.part` and is kept when the connection is cut, now or in an earlier call; only the
    rest is asked for. `checksum` is "md5:...", "sha256:..." or another of hashlib's. `path` appears once the file is
    whole and right. `report(bytes_done, bytes, text)` is called as it comes; without it, lines go to stderr.
    """
    if not url.startswith(("http://", "https://")):
        raise DownloadError(f"{url}: only http and https addresses are downloaded")
    report = report or plain_lines()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    why = "no attempt was made"
    for _ in range(attempts):
        try:
            resumed = _transfer(url, part, report, timeout)
        except _Cut as cut:
            why = str(cut)
            continue
        found = None if checksum is None else hash_file(part, checksum.partition(":")[0])
        if found == checksum:
            os.replace(part, path)
            return path
        part.unlink()
        why = f"the checksum is {found}, expected {checksum}"
        if not resumed:  # a resumed file may be two versions in one, and is worth another try
            break
    raise DownloadError(f"{url}: {why}")


def hash_file(path: Path, algorithm: str) -> str:
    """The checksum of a file, as "algorithm:hex digits"."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{algorithm}:{digest.hexdigest()}"


def plain_lines() -> Report:
    """Print a line to stderr at the start and at every tenth of a file."""
    printed: dict[str, int] = {}

    def report(done: float, total: int, text: str) -> None:
        tenth = int(10 * done / total) if total else int(done / 2**26)
        if tenth <= printed.get(text, -1):
            return
        printed[text] = tenth
        of = f" of {total / 1e6:.1f}" if total else ""
        print(f"{text}: {done / 1e6:.1f}{of} MB", file=sys.stderr, flush=True)

    return report


def _transfer(url: str, part: Path, report: Report, timeout: float) -> bool:
    """Append what is missing to `part`, or begin it anew where the server gives only the whole; True if appended."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "prospr", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        return _refused(error, url, part, have)
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise DownloadError(f"{url}: {getattr(error, 'reason', error)}") from error
    with response:
        if response.status == 206 and _range_start(response) != have:
            part.unlink()
            raise _Cut("the server sent another range than it was asked for")
        resumed = response.status == 206
        done = have if resumed else 0
        length = response.headers.get("Content-Length", "")
        total = done + int(length) if length.isdigit() else 0
        name = url.rpartition("/")[2]
        with part.open("ab" if resumed else "wb") as file:
            try:
                while block := response.read(CHUNK):
                    file.write(block)
                    done += len(block)
                    report(done, total, name)
            except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
                raise _Cut(f"cut after {done} bytes: {error or type(error).__name__}") from error
            file.flush()
            os.fsync(file.fileno())
        if done < total:  # http.client gives a short body without a word
            raise _Cut(f"cut after {done} of {total} bytes")
    return resumed


def _refused(error: urllib.error.HTTPError, url: str, part: Path, have: int) -> bool:
    with error:
        if error.code == 416 and have:  # nothing is left to send: the part is whole, or of another file
            if (error.headers.get("Content-Range") or "").endswith(f"/{have}"):
                return True
            part.unlink()
            raise _Cut("the server has a shorter file than was begun") from error
        if error.code >= 500 or error.code == 429:
            raise _Cut(f"the server answered {error.code} {error.reason}") from error
        raise DownloadError(f"{url}: the server answered {error.code} {error.reason}") from error


def _range_start(response: http.client.HTTPResponse) -> int | None:
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
    return int(found[1]) if found else None
