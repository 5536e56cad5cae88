"""The service goes on however many visitors say nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from time import monotonic

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from nsa_tune.fleet.service.http import connections
from tests.fleet.service.served import Served, served


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    """A service with room for 20 connections, each of which has 2 s for a request."""
    monkeypatch.setattr(connections, "_REQUEST_S", 2.0)
    monkeypatch.setattr("nsa_tune.fleet.service.http.server.most_connections", lambda: 20)
    with served(tmp_path / "t.db") as running:
        yield running


def _connected(port: int, said: bytes = b"GET /healthz HTTP/1.1\r\nHost: loc") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(said)
    return connection


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: loc"], ids=["nothing", "a part"])
def test_who_says_nothing_is_hung_up_on(silent: Served, said: bytes) -> None:
    with closing(_connected(silent.port, said)) as connection:
        begin = monotonic()
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""
        assert monotonic() - begin < 15


def test_who_says_a_letter_at_a_time_is_hung_up_on(silent: Served) -> None:
    with (
        closing(_connected(silent.port)) as connection,
        pytest.raises(OSError, match=r"reset|pipe"),
    ):
        for _ in range(200):
            connection.sendall(b"a")
            connection.settimeout(0.1)
            try:
                assert connection.recv(1) == b""
                raise ConnectionResetError("reset")
            except TimeoutError:
                pass


def test_of_too_many_the_longest_silent_makes_room(silent: Served) -> None:
    with ExitStack() as connected:
        for _ in range(60):
            connected.enter_context(closing(_connected(silent.port)))
        assert silent.get("/healthz", role=None).status == 200
