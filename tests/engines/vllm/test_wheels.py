"""Reading a part of a remote file, from a server of its own."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.error import URLError

import pytest

from tests.engines.vllm.wheels import RemoteFile

_served: list[int] = []


def _archive() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("kernels.so", bytes(2_000_000))
        archive.writestr("a.py", "print('a')")
    return data.getvalue()


class _Server(BaseHTTPRequestHandler):
    data = _archive()
    ranges = True

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d*)-(\d+)", self.headers["Range"])
        assert wanted is not None
        size = len(self.data)
        start = int(wanted[1]) if wanted[1] else size - int(wanted[2])
        part = self.data[start : int(wanted[2]) + 1 if wanted[1] else size]
        self.send_response(206 if self.ranges else 200)
        self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{size}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        _served.append(len(part))

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = Thread(target=server.serve_forever)
    thread.start()
    _served.clear()
    yield f"http://127.0.0.1:{server.server_port}/wheel"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_member_is_read_without_the_rest(url: str) -> None:
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(url), 4096)) as archive:
        assert archive.read("a.py") == b"print('a')"

    assert sum(_served) < 50_000


def test_a_server_without_ranges_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Server, "ranges", False)

    with pytest.raises(URLError, match="does not answer range requests"):
        RemoteFile(url)
