"""A dashboard goes on, whatever one source holds."""

from __future__ import annotations

import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


from nsa_tune.reports.analysis import report as analysis
from nsa_tune.reports.dashboard import application, watched_files
from nsa_tune.reports.formats import json_document
from tests.db.loose import loosen
from tests.records import stored
from tests.reports.dashboard.served import served
from tests.reports.dashboard.test_application import TABLE, store
from tests.reports.synthetic import key_of

PATHS = ("/", "/api/live", "/api/report")


def _connected(port: int, said: bytes = b"GET / HTTP/1.1\r\nHost: loc") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(said)
    return connection


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


@pytest.mark.parametrize(
    "statements",
    [
        ("DROP TABLE runs", _ENDLESS),
        ("UPDATE measurements SET batch = 'nonsense' WHERE id = 1",),
        ("UPDATE measurements SET batch = 'extend:0+1' WHERE id = 1",),
        ("UPDATE runs SET outcome = NULL, arguments = '{\"points\": 5}'",),
        ("UPDATE runs SET started_at = x'ff', arguments = x'fe'",),
        ("UPDATE measurements SET reason = x'ff' WHERE id = 3",),
        (f"UPDATE runs SET arguments = '{'[' * 50_000}'",),
    ],
    ids=["endless view", "no batch", "other mode", "points", "bytes", "reason", "nested"],
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


@pytest.mark.parametrize("value", [None, 5, 0.5, b"\xff"])
def test_a_batch_of_another_type_is_named_and_hides_no_other(value: object, tmp_path: Path) -> None:
    bad = store(tmp_path / "bad.db", outcome=None)
    loosen(bad)
    with closing(sqlite3.connect(bad)) as connection, connection:
        connection.execute("UPDATE measurements SET batch = ? WHERE id = 1", [value])
    with served(bad, store(tmp_path / "good.db")) as running:
        assert [running.get(path).status for path in PATHS] == [200] * len(PATHS)
        assert running.get("/").body.decode().count('<section class="table"') == 1
        live = running.get("/api/live").document["databases"]

    assert "bad.db is damaged" in live[0]["problem"]
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
    path = stored(tmp_path / "a.db", TABLE, replace(TABLE, key=key_of(heads=16)))
    with served(path) as running:
        assert running.get("/").body.decode().count('<section class="table"') == 1
        assert len(running.get("/api/report").document["sections"]) == 1
        (live,) = running.get("/api/live").document["databases"]

    assert "there is no report of" in live["problem"]
    assert live["runs"]


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
