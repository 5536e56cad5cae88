"""A dashboard goes on: whatever one source holds, and however many visitors say nothing."""

from __future__ import annotations

import logging
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from nsa_tune._errors import UsageError
from nsa_tune.db.store import Store
from nsa_tune.reports.analysis import report as analysis
from nsa_tune.reports.dashboard import application, connections, watched_files
from nsa_tune.reports.dashboard.access import token_for
from nsa_tune.reports.dashboard.sparing_log import Sparing, sparing
from nsa_tune.reports.formats import json_document
from nsa_tune.reports.html import page
from tests.reports.dashboard.served import Served, served
from tests.reports.dashboard.test_application import TABLE, store
from tests.reports.synthetic import key_of

PATHS = ("/", "/api/live", "/api/report", "/api/measurements")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    """A dashboard with room for 20 connections, each of which has 2 s for a request."""
    monkeypatch.setattr(connections, "_REQUEST_S", 2.0)
    monkeypatch.setattr("nsa_tune.reports.dashboard.server.most_connections", lambda: 20)
    with served(store(tmp_path / "a.db")) as running:
        yield running


def _connected(port: int, said: bytes = b"GET / HTTP/1.1\r\nHost: loc") -> socket.socket:
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
    with ExitStack() as open_ones:
        for _ in range(60):
            open_ones.enter_context(closing(_connected(silent.port)))
        for path in PATHS:
            assert silent.get(path).status == 200


def test_who_does_not_take_the_answer_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connections, "_RESPONSE_S", 1.0)
    with served(store(tmp_path / "a.db")) as running:
        ask = b"GET /api/measurements HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with closing(socket.socket()) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(("127.0.0.1", running.port))
            connection.sendall(ask * 50)
            connection.settimeout(20)
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                for _ in range(400):
                    connection.sendall(ask)
                    _wait(0.05)


def _wait(seconds: float) -> None:
    end = monotonic() + seconds
    while monotonic() < end:
        pass


# --- one bad source


def _broken(path: Path, *statements: str) -> Path:
    store(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path


_ENDLESS = (
    "CREATE VIEW runs AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    "SELECT i AS id, 1 AS key_id, 1 AS device_id, '{}' AS arguments, '' AS started_at, "
    "NULL AS ended_at, NULL AS outcome FROM n"
)


_FREE = (
    "CREATE TABLE rows AS SELECT * FROM measurements", "DROP TABLE measurements",
    "CREATE TABLE measurements AS SELECT * FROM rows",
)  # fmt: skip
"""Without constraints."""


@pytest.mark.parametrize(
    "statements",
    [
        ("DROP TABLE runs", _ENDLESS),
        (*_FREE, "UPDATE measurements SET batch = NULL WHERE id = 1"),
        ("UPDATE measurements SET batch = 'nonsense' WHERE id = 1",),
        ("UPDATE measurements SET batch = 'extend:0+1' WHERE id = 1",),
        ("UPDATE runs SET outcome = NULL, arguments = '{\"points\": 5}'",),
        ("UPDATE runs SET started_at = x'ff', arguments = x'fe'",),
        ("UPDATE measurements SET reason = x'ff' WHERE id = 3",),
        (f"UPDATE runs SET arguments = '{'[' * 50_000}'",),
    ],
    ids=["endless view", "null", "no batch", "other mode", "points", "bytes", "reason", "nested"],
)
def test_one_bad_source_hides_no_other(statements: tuple[str, ...], tmp_path: Path) -> None:
    bad = _broken(tmp_path / "bad.db", *statements)
    with served(bad, store(tmp_path / "good.db")) as running:
        for path in PATHS:
            assert running.get(path).status == 200, path
        text = running.get("/").body.decode()
        live = running.get("/api/live").document["databases"]

    assert text.count('<section class="table"') >= 1
    assert [one["name"] for one in live] == ["bad.db", "good.db"]
    assert not live[1]["problem"]


def test_a_table_of_which_no_report_can_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = analysis.build

    def build(tables: Any, **named: Any) -> Any:
        found = list(tables)
        if any(table.key.heads == 16 for table in found):
            raise ZeroDivisionError("made up")
        return real(found, **named)

    monkeypatch.setattr(watched_files, "build", build)
    path = store(tmp_path / "a.db")
    with Store.open(path) as opened:
        key = key_of(heads=16)
        opened.add(opened.begin_run(key, TABLE.device, {}), TABLE.measurements)
    with served(path) as running:
        assert running.get("/").body.decode().count('<section class="table"') == 1
        assert len(running.get("/api/report").document["sections"]) == 1
        (live,) = running.get("/api/live").document["databases"]

    assert "there is no report of" in live["problem"]
    assert live["runs"]


def test_a_section_that_cannot_be_drawn_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = page.written

    def written(report: Any, frame: Any) -> str:
        if any(section.key.heads == 16 for section in report.sections):
            raise KeyError("made up")
        return real(report, frame)

    monkeypatch.setattr(application, "written", written)
    path = store(tmp_path / "a.db")
    with Store.open(path) as opened:
        key = key_of(heads=16)
        opened.add(opened.begin_run(key, TABLE.device, {}), TABLE.measurements)
    with served(path) as running:
        assert running.get("/").body.decode().count('<section class="table"') == 1


# --- bodies


def test_a_queue_of_visitors_costs_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = json_document.as_json

    def as_json(report: Any) -> str:
        made.append("report")
        return real(report)

    monkeypatch.setattr(application, "as_json", as_json)
    with served(store(tmp_path / "a.db")) as running:
        for _ in range(20):
            # They leave before the answer comes.
            connection = _connected(
                running.port, b"GET /api/report HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
            connection.close()
        with ThreadPoolExecutor(20) as pool:
            found = list(pool.map(lambda _: running.get("/api/report"), range(20)))

    assert {one.status for one in found} == {200}
    assert made == ["report"]


@pytest.mark.parametrize("path", PATHS)
def test_no_answer_says_where_a_file_lies(path: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.db"
    bad.write_bytes(b"no database" * 100)
    with served(store(tmp_path / "a.db"), bad, tmp_path / "none.db") as running:
        assert str(tmp_path) not in running.get(path).body.decode()


# --- tokens and the log


@pytest.mark.parametrize(
    "token", ["пароль", "\ud800", "a b", "a;b", 'a"b', "a\r\nb", "", "x" * 300]
)
def test_a_token_that_no_cookie_holds_is_refused_at_the_start(token: str) -> None:
    with pytest.raises(UsageError, match="a token has the letters"):
        token_for("127.0.0.1", remote=False, given=token)


def test_a_token_of_letters_passes() -> None:
    assert token_for("127.0.0.1", remote=False, given="s3cret_~.-") == "s3cret_~.-"


def test_a_log_gets_ten_lines_a_minute_and_the_number_of_the_others() -> None:
    now = [0.0]
    rule = Sparing(lambda: now[0])
    records = [logging.makeLogRecord({"msg": f"line {i}"}) for i in range(1000)]

    passed = [record for record in records if rule.filter(record)]
    now[0] = 61.0
    last = logging.makeLogRecord({"msg": "line %s", "args": ("x",)})

    assert len(passed) == 10
    assert rule.filter(last)
    assert last.getMessage() == "line x (990 lines left out before)"


def test_loggers_are_spared_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("asyncio")
    with sparing("asyncio"):
        for _ in range(50):
            logger.error("out of descriptors")
    assert len(caplog.records) == 10
    logger.error("again")
    assert len(caplog.records) == 11
