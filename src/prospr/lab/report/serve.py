"""The page of run folders, served live: made anew when the runs have changed, and nothing else is served.

The open page asks `/state` every two seconds and takes in the new page when that has changed; see live.js.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch  # noqa: F401  masks need it: now, and not while the first page is made, which would seem slow to make

from prospr.errors import FolderError, PruningError
from prospr.lab.report.markup import tag
from prospr.lab.report.page import document
from prospr.lab.report.runs import TITLE, runs_page, scripts
from prospr.lab.runs.records import gather

__all__ = ["LivePage", "make_server"]

HOST, PORT = "127.0.0.1", 8000
EVERY = 2.0  # seconds: folders are not looked at more often
SHARE = 0.2  # of one core, which making pages may take
FILES = ("experiment.json", "metrics.jsonl", "result.json", "error.json", "scores.json", "masks.safetensors")


class LivePage:
    """The page of `runs` as it is now. What it is made of is looked at, and made anew, `every` so many seconds at most;
    a page that takes long to make is made less often, so that the runs have the machine."""

    def __init__(
        self,
        runs: Sequence[str | os.PathLike[str]],
        baseline: str | None = None,
        title: str | None = None,
        every: float = EVERY,
    ) -> None:
        self._runs, self._baseline, self._title, self._every = list(runs), baseline, title or TITLE, every
        self._lock = threading.Lock()
        self._stamp = self._page = ""
        self._due = 0.0

    def now(self) -> tuple[str, str]:
        """What the runs are like, in a few digits, and their page."""
        with self._lock:
            if time.monotonic() >= self._due:
                start = time.monotonic()
                stamp = self._look()
                if stamp != self._stamp:
                    self._page, self._stamp = self._make(stamp), stamp
                now = time.monotonic()
                self._due = now + max(self._every, (now - start) / SHARE if self._every else 0.0)
            return self._stamp, self._page

    def _look(self) -> str:
        """A hash of the times and sizes of every file that the page is made of."""
        seen = hashlib.sha256()
        for path in _homes(self._runs):
            for name in FILES:
                try:
                    found = (path / name).stat()
                except OSError:
                    continue
                seen.update(f"{path}/{name} {found.st_mtime_ns} {found.st_size}\n".encode())
        return seen.hexdigest()[:16]

    def _make(self, stamp: str) -> str:
        try:
            return runs_page(gather(self._runs), self._baseline, self._title, None, live=stamp)
        except FolderError as error:
            told = ("No run is there yet.", f"{error}. The page fills when one begins.")
        except (PruningError, ValueError, OSError) as error:  # of a folder that is being changed, say
            told = ("The page cannot be made.", str(error))
        header = tag("header", tag("p", self._title, class_="kicker"), tag("h1", told[0]), tag("p", told[1]))
        return document(self._title, header, tag("main"), *scripts(stamp), live=stamp)


def make_server(page: LivePage, host: str = HOST, port: int = PORT) -> ThreadingHTTPServer:
    """A server of `page`, which `serve_forever()` starts; with port 0 it takes a free one, see `server_port`.

    It knows two addresses, "/" and "/state", and reads no file by a name it is asked for. Bound to this machine, it
    answers only to this machine's names, so that no page from elsewhere can have its name lead here and read along.
    """

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version, protocol_version = "prospr", "", "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(True)

        def do_HEAD(self) -> None:
            self._answer(False)

        def _answer(self, with_body: bool) -> None:
            if not _known(self.headers.get("Host", ""), host):
                self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
                return
            if self.path not in ("/", "/state"):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            stamp, html = page.now()
            body, kind = (html, "text/html") if self.path == "/" else (stamp, "text/plain")
            content = body.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """A line every two seconds would hide what matters."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A browser that goes away in the middle of an answer is no error."""

    return Server((host, port), Handler)


def _known(name: str, host: str) -> bool:
    """Whether a request was for a name of this machine, where only those can be."""
    if host not in ("127.0.0.1", "localhost", "::1"):
        return True
    return name.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]") or name in ("127.0.0.1", "localhost")


def _homes(runs: Sequence[str | os.PathLike[str]]) -> Iterator[Path]:
    """Folders that are runs or may become some; none where there is nothing yet."""
    for run in map(Path, runs):
        yield run
        if run.is_dir():
            yield from sorted(path for path in run.iterdir() if path.is_dir())
