"""Runs in a database, read-only: what is going on now, and what one run measured."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa_tune._errors import NoTunedData
from nsa_tune.backend.types.records import Status, Table
from nsa_tune.db.connection import reading
from nsa_tune.db.reader import measurement_columns, table_of, wanted_keys
from nsa_tune.db.text_table import checked_measurement
from nsa_tune.db.values import checked, count_of, number_of, optional_text_of, text_of

_RUNS = (
    "SELECT runs.id, digest, arguments, started_at, ended_at, outcome, "
    "count(measurements.id), coalesce(sum(status <> 'ok'), 0), max(measured_at) "
    "FROM runs JOIN keys ON keys.id = key_id LEFT JOIN measurements ON run_id = runs.id "
    "GROUP BY runs.id ORDER BY runs.id DESC LIMIT ?"
)
_OF_RUN = (
    "SELECT {columns}, measured_at FROM measurements WHERE run_id = ? ORDER BY measured_at, id"
)
_NEWEST = (
    "SELECT run_id, point, batch, arm, status, latency_us, reason, measured_at FROM measurements "
    "WHERE ? = '' OR status <> ? ORDER BY id DESC LIMIT ?"
)
_STATE = (
    "SELECT (SELECT coalesce(max(id), 0) FROM measurements), (SELECT count(*) FROM runs), "
    "(SELECT count(ended_at) FROM runs)"
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of `nsa-tune run`, or one import."""

    number: int
    digest: str
    """Digest of the key that it measured under."""
    arguments: dict[str, Any]
    started_at: str
    """ISO 8601 in UTC, like the other times."""
    ended_at: str | None
    outcome: str | None
    """"done", "budget" or "interrupted"; None while it runs, and if it was killed."""
    measurements: int
    failed: int
    measured_at: str | None
    """Time of its newest measurement."""


@dataclass(frozen=True, slots=True)
class Newest:
    """One stored measurement, as a dashboard shows it."""

    run: int
    point: str
    batch: str
    arm: str
    status: str
    latency_us: float | None
    reason: str
    measured_at: str


@contextmanager
def _measured(path: Path) -> Iterator[tuple[sqlite3.Connection, int]]:
    with reading(path) as (connection, version):
        if version == 0:
            raise NoTunedData(f"{path} is empty; measure with `nsa-tune run`")
        yield connection, version


def state_of(path: Path) -> tuple[int, int, int]:
    """Numbers that change whenever something is stored; cheap enough to poll every second.

    Raises:
        StoreError: when the database cannot be read.
        NoTunedData: when it is empty.
    """
    with _measured(path) as (connection, _):
        newest, runs, ended = connection.execute(_STATE).fetchone()
        return count_of(newest), count_of(runs), count_of(ended)


def runs_of(path: Path, most: int = 20) -> list[Run]:
    """The newest runs, the newest first.

    Raises:
        StoreError: when the database cannot be read.
        NoTunedData: when it is empty.
    """
    with _measured(path) as (connection, _):
        return [Run(*checked(_RUN, row)) for row in connection.execute(_RUNS, [most])]


def _words(arguments: object) -> dict[str, Any]:
    words = json.loads(text_of(arguments))
    return words if isinstance(words, dict) else {}


_RUN = (
    count_of, text_of, _words, text_of, optional_text_of, optional_text_of, count_of, count_of,
    optional_text_of,
)  # fmt: skip
_MEASURED = (count_of, text_of, text_of, text_of, text_of, number_of, text_of, text_of)


def newest_of(path: Path, most: int = 20, *, failed: bool = False) -> list[Newest]:
    """The measurements stored last, or the failures among them, the newest first.

    Raises:
        StoreError: when the database cannot be read.
        NoTunedData: when it is empty.
    """
    ok = str(Status.OK) if failed else ""
    with _measured(path) as (connection, _):
        rows = connection.execute(_NEWEST, [ok, ok, most])
        return [Newest(*checked(_MEASURED, row)) for row in rows]


def run_table(path: Path, number: int) -> Table:
    """What run `number` measured, as a table of its own.

    Raises:
        StoreError: when the database cannot be read.
        NoTunedData: when there is no such run, or it measured nothing.
    """
    with _measured(path) as (connection, version):
        of_run = connection.execute("SELECT key_id FROM runs WHERE id = ?", [number]).fetchall()
        query = _OF_RUN.format(columns=measurement_columns(version))
        rows = connection.execute(query, [number]).fetchall()
        tables = [
            table_of(connection, path, *key, version)
            for key in wanted_keys(connection)
            if (key[0],) in of_run
        ]
        newest = {row[:3]: checked_measurement(*row[:-1]) for row in rows}
        times = {row[:3]: text_of(row[-1]) for row in rows}
    if not tables or not rows:
        raise NoTunedData(
            f"{path} has no run {number} that measured something; "
            f"`nsa-tune db list --runs --db {path}` lists those that did"
        )
    return replace(
        tables[0],
        measurements=tuple(newest.values()),
        source=f"{path}@run:{number}",
        measured_at=max(times.values()),
        times=times,
    )
