"""Runs in a database, read-only: what is going on now, and what one run measured."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa_tune._errors import NoTunedData
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db import reader as tables
from nsa_tune.db.connection import (
    check_regular_file,
    connect_read_only,
    damage_errors,
    schema_version,
    store_errors,
)
from nsa_tune.db.text_table import checked_measurement

_RUNS = (
    "SELECT runs.id, digest, arguments, started_at, ended_at, outcome, "
    "count(measurements.id), coalesce(sum(status <> 'ok'), 0), max(measured_at) "
    "FROM runs JOIN keys ON keys.id = key_id LEFT JOIN measurements ON run_id = runs.id "
    "GROUP BY runs.id ORDER BY runs.id DESC LIMIT ?"
)
_OF_RUN = (
    "SELECT point, batch, arm, status, latency_us, low_us, high_us, samples, error, reason, "
    "{discarded}, {pass_us}, measured_at FROM measurements WHERE run_id = ? "
    "ORDER BY measured_at, id"
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
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    check_regular_file(path)
    with store_errors(path), closing(connect_read_only(path)) as connection:
        connection.execute("BEGIN")  # one snapshot, whatever a run adds meanwhile
        if schema_version(connection, path) == 0:
            raise NoTunedData(f"{path} is empty; measure with `nsa-tune run`")
        yield connection


def state_of(path: Path) -> tuple[int, int, int]:
    """Numbers that change whenever something is stored; cheap enough to poll every second.

    Raises:
        StoreError: when the database cannot be read.
        NoTunedData: when it is empty.
    """
    with _reading(path) as connection:
        newest, runs, ended = connection.execute(_STATE).fetchone()
    return int(newest), int(runs), int(ended)


def runs_of(path: Path, most: int = 20) -> list[Run]:
    """The newest runs, the newest first.

    Raises:
        StoreError: when the database cannot be read.
        NoTunedData: when it is empty.
    """
    with _reading(path) as connection:
        rows = connection.execute(_RUNS, [most]).fetchall()
    return [
        Run(number, str(digest), _arguments(words, path), str(started), ended, outcome, count,
            failed, measured_at)
        for number, digest, words, started, ended, outcome, count, failed, measured_at in rows
    ]  # fmt: skip


def _arguments(words: object, path: Path) -> dict[str, Any]:
    with damage_errors(path):
        arguments = json.loads(str(words))
    return arguments if isinstance(arguments, dict) else {}


def newest_of(path: Path, most: int = 20, *, failed: bool = False) -> list[Newest]:
    """The measurements stored last, or the failures among them, the newest first.

    Raises:
        StoreError: when the database cannot be read.
        NoTunedData: when it is empty.
    """
    ok = str(Status.OK) if failed else ""
    with _reading(path) as connection:
        return [Newest(*row) for row in connection.execute(_NEWEST, [ok, ok, most])]


def places_measured(path: Path, digest: str, points: Sequence[str]) -> int:
    """The number of different (point, batch, arm) of `points` measured under the key `digest`.

    Raises:
        StoreError: when the database cannot be read.
        NoTunedData: when it is empty.
    """
    marks = ", ".join("?" * len(points))
    with _reading(path) as connection:
        (count,) = connection.execute(
            "SELECT count(*) FROM (SELECT DISTINCT point, batch, arm FROM measurements "
            "JOIN runs ON runs.id = run_id JOIN keys ON keys.id = key_id "
            f"WHERE digest = ? AND point IN ({marks}))",
            [digest, *points],
        ).fetchone()
    return int(count)


def run_table(path: Path, number: int) -> Table:
    """What run `number` measured, as a table of its own.

    Raises:
        StoreError: when the database cannot be read.
        NoTunedData: when there is no such run, or it measured nothing.
    """
    with _reading(path) as connection:
        found = connection.execute(
            "SELECT digest FROM runs JOIN keys ON keys.id = key_id WHERE runs.id = ?", [number]
        ).fetchone()
        columns = tables.columns_since(schema_version(connection, path))
        rows = connection.execute(_OF_RUN.format(**columns), [number]).fetchall()
    if found is None or not rows:
        raise NoTunedData(
            f"{path} has no run {number} that measured something; "
            f"`nsa-tune db list --runs --db {path}` lists those that did"
        )
    table = next(one for one in tables.read_database(path) if one.key.digest == found[0])
    with damage_errors(path):
        newest: dict[tuple[object, ...], Measurement] = {
            row[:3]: checked_measurement(*row[:-1]) for row in rows
        }
    return replace(
        table,
        measurements=tuple(newest.values()),
        source=f"{path}@run:{number}",
        measured_at=max(str(row[-1]) for row in rows),
        times={row[:3]: str(row[-1]) for row in rows},
    )
