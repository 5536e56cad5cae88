"""A small server that keeps the contract of a service: what clients are tested against."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True, slots=True)
class Posted:
    """What a client has sent."""

    path: str
    body: bytes
    headers: dict[str, str]


@dataclass(slots=True)
class Kept:
    """What the server has and how it behaves. A test may change it at any time."""

    files: dict[str, bytes] = field(default_factory=dict)
    """By path."""
    token: str = ""
    """That clients need; "" where they need none."""
    headers: dict[str, str] = field(default_factory=dict)
    """In place of the right ones; "" leaves one out."""
    redirects: dict[str, str] = field(default_factory=dict)
    drip_s: float = 0.0
    """Pause between the bytes of a body."""
    cut: bool = False
    """Break off after half of a body."""
    status: int = 0
    """Answer everything with this error."""
    requests: list[tuple[str, int, bool]] = field(default_factory=list)
    """(path, status, whether a token was sent) of each request, the oldest first."""
    posted: list[Posted] = field(default_factory=list)

    def sent(self, status: int) -> int:
        """How many requests were answered with this status."""
        return [one for _, one, _ in self.requests].count(status)


class Server(ThreadingHTTPServer):
    """Listens on a free port of this machine."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, kept: Kept) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kept = kept

    @property
    def url(self) -> str:
        """Its address, without a path."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(kept: Kept) -> Iterator[Server]:
    """A server that runs in a thread until the block ends."""
    with Server(kept) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """A file, 304, or an error."""
        kept = self.server.kept
        if self._refused():
            return
        path = self.path.partition("?")[0]
        if path in kept.redirects:
            self._answer(302, b"", {"Location": kept.redirects[path]})
        elif path not in kept.files:
            self._error(404, "there is no such page")
        else:
            body = kept.files[path]
            digest = hashlib.sha256(body).hexdigest()
            right = {"ETag": f'"sha256-{digest}"', "X-Content-SHA256": digest}
            if self.headers.get("If-None-Match") == right["ETag"]:
                self._answer(304, b"", {"ETag": right["ETag"]})
            else:
                self._answer(200, body, right | kept.headers)

    def do_POST(self) -> None:
        """Keep what was sent."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._refused():
            self.server.kept.posted.append(Posted(self.path, body, dict(self.headers)))
            counts = {"added": 1, "known": 0, "decisions": 2, "batches": 1}
            self._answer(200, json.dumps(counts).encode(), {})

    def _refused(self) -> bool:
        kept = self.server.kept
        if kept.status:
            self._error(kept.status, "the service is ill")
        elif kept.token and self.headers.get("Authorization") != f"Bearer {kept.token}":
            self._error(401, "this token is not known here")
        else:
            return False
        return True

    def _error(self, status: int, sentence: str) -> None:
        self._answer(status, json.dumps({"error": sentence}).encode(), {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        kept = self.server.kept
        kept.requests.append((self.path, status, "Authorization" in self.headers))
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kept.drip_s and status == 200:
            self._drip(body)
        else:
            self.wfile.write(body[: len(body) // 2] if kept.cut and status == 200 else body)

    def _drip(self, body: bytes) -> None:
        pause = threading.Event()
        try:
            for byte in body:
                self.wfile.write(bytes([byte]))
                pause.wait(self.server.kept.drip_s)
        except OSError:
            pass  # the client has left, as it should

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
