"""A web server on this machine that cuts, refuses and forgets as it is told."""

import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@dataclass
class Web:
    """`files` by path. `cuts`: after so many bytes the connection ends, once each; `answers`: statuses given first."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    lengths: bool = True
    shift: int = 0
    asked: list[tuple[str, str | None]] = field(default_factory=list)


def _handler(web):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = self.headers.get("Range")
            web.asked.append((self.path, wanted))
            content = web.files.get(self.path)
            status = web.answers.pop(0) if web.answers else (404 if content is None else 200)
            if status != 200:
                return self.send_error(status)
            start = int(re.match(r"bytes=(\d+)-", wanted)[1]) if wanted and web.ranges else 0
            if start and start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            self.send_response(206 if start else 200)
            if start:
                first = start + web.shift
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            if web.lengths:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            end = start + web.cuts.pop(0) if web.cuts else len(content)
            self.wfile.write(content[start:end])
            return None

        def log_message(self, *args):
            pass

    return Handler


@pytest.fixture
def web(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    state = Web()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    state.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()
