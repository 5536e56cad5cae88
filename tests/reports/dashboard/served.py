"""A dashboard on a free port of this machine, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsa_tune.reports.dashboard.server import config_of
from tests.serving import Answer, answer_of, serving


class Served:
    """A running dashboard."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}/"

    def get(self, path: str = "/", *, method: str = "GET", **headers: str) -> Answer:
        """What a request answers."""
        return answer_of(self.port, method, path, headers)


@contextmanager
def served(*paths: Path) -> Iterator[Served]:
    """A dashboard over `paths` in a thread of its own."""
    with serving(config_of(list(paths))) as port:
        yield Served(port)
