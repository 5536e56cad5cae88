"""A dashboard on a free port of this machine, for tests."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from nsa_tune.reports.dashboard.server import config_of


class Question(NamedTuple):
    """One answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Served:
    """A running dashboard."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}/"

    def get(self, path: str = "/", *, method: str = "GET", **headers: str) -> Question:
        """What a request answers; underscores in header names stand for hyphens."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Question(response.status, found, response.read())
        finally:
            connection.close()


@contextmanager
def served(*paths: Path) -> Iterator[Served]:
    """A dashboard over `paths` in a thread of its own."""
    server = uvicorn.Server(config_of(list(paths)))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield Served(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
