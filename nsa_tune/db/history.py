"""Everything that a database or a text table holds of its keys, older rows too: what is merged.

Read with the checks of `reader`, since it may be a stranger's file.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from nsa_tune.backend.types.records import Device, Key, Measurement, Table
from nsa_tune.db.connection import reading
from nsa_tune.db.reader import LIMITS_SINCE, MOST_STORED, device, measurement_columns, wanted_keys
from nsa_tune.db.text_table import checked_measurement, format_row, read_text
from nsa_tune.db.values import checked, count_of, optional_text_of, text_of

_MOST_RUNS = 2**16
"""Of one key."""
_LONGEST_ARGUMENTS = 2**16
_OUTCOMES = ("done", "interrupted", "budget")
_RUNS = (
    "SELECT runs.id, arguments, started_at, ended_at, outcome, name, arch, sms, "
    "shared_memory_optin, memory, l2 FROM runs JOIN devices ON devices.id = device_id "
    "WHERE key_id = ? ORDER BY runs.id"
)
_ROWS = (
    "SELECT run_id, measured_at, {columns} FROM measurements JOIN runs ON runs.id = run_id "
    "WHERE key_id = ? ORDER BY run_id, measurements.id"
)
_LIMITS = (
    "SELECT run_id, name, value, past, found_at FROM limits JOIN runs ON runs.id = run_id "
    "WHERE key_id = ? ORDER BY run_id, limits.id"
)
_LIMIT = (text_of, count_of, text_of, text_of)


class Limit(NamedTuple):
    """One limit that a probe found."""

    name: str
    value: int
    past: str
    """What happened behind it."""
    found_at: str


@dataclass(frozen=True, slots=True)
class PastRun:
    """One run, with all that it stored. Times are ISO 8601, UTC."""

    device: Device
    arguments: str
    """JSON."""
    started_at: str
    ended_at: str | None = None
    outcome: str | None = None
    rows: tuple[tuple[str, Measurement], ...] = ()
    """Each with the time when it was measured."""
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """Every run of one key."""

    key: Key
    runs: tuple[PastRun, ...]


def order_of(row: Measurement) -> tuple[str, int, str]:
    """Which of two measurements of one cell that were taken at the same time counts: the greater.

    Of those that are the same in a text table it is the one with more digits.
    """
    exact = repr(row)
    return format_row(row), len(exact), exact


def read_histories(path: Path) -> list[History]:
    """What `path` holds, a database or a text table; keys without a run are left out.

    The measurements of a text table that has no ages count as taken when its newest was.

    Raises:
        StoreError: when it cannot be read.
    """
    if path.suffix == ".tsv":
        return [history_of(read_text(path), {"merged": "text"})]
    with reading(path) as (connection, version):
        keys = wanted_keys(connection) if version else []
        histories = [
            History(key, tuple(_runs(connection, version, number))) for number, key in keys
        ]
    return [history for history in histories if history.runs]


def history_of(table: Table, arguments: Mapping[str, str]) -> History:
    """A text table as one run, which was asked for by `arguments`."""
    at = table.measured_at
    rows = tuple((table.time_of(row), row) for row in table.measurements)
    limits = tuple(
        Limit(name, value, "merged from a text table", at) for name, value in table.limits.items()
    )
    run = PastRun(table.device, json.dumps(arguments), at, at, "done", rows, limits)
    return History(table.key, (run,))


def _runs(connection: sqlite3.Connection, version: int, number: int) -> list[PastRun]:
    rows = _by_run(connection, _ROWS.format(columns=measurement_columns(version)), number)
    limits = _by_run(connection, _LIMITS, number) if version >= LIMITS_SINCE else {}
    rows_of_runs = connection.execute(_RUNS, [number]).fetchmany(_MOST_RUNS + 1)
    if len(rows_of_runs) > _MOST_RUNS:
        raise ValueError(f"more than {_MOST_RUNS} runs of one key")
    return [
        PastRun(
            device(facts), _arguments(arguments), text_of(started_at),
            optional_text_of(ended_at),
            outcome if outcome in _OUTCOMES else None,
            tuple((text_of(at), checked_measurement(*row)) for at, *row in rows.get(run, ())),
            tuple(Limit(*checked(_LIMIT, limit)) for limit in limits.get(run, ())),
        )
        for run, arguments, started_at, ended_at, outcome, *facts in rows_of_runs
    ]  # fmt: skip


def _by_run(
    connection: sqlite3.Connection, query: str, number: int
) -> dict[int, list[tuple[Any, ...]]]:
    stored = connection.execute(query, [number]).fetchmany(MOST_STORED + 1)
    if len(stored) > MOST_STORED:
        raise ValueError(f"more than {MOST_STORED} rows of one key")
    return {
        run: [rest for _, *rest in rows]
        for run, rows in groupby(stored, key=lambda row: row[0])
    }  # fmt: skip


def _arguments(text: object) -> str:
    """What a run was asked for, without anything that the tuner does not write."""
    try:
        words = json.loads(text_of(text)[:_LONGEST_ARGUMENTS])
    except (ValueError, RecursionError):
        words = {}
    kept = words.items() if isinstance(words, dict) else ()
    return json.dumps({name: value for name, value in kept if _plain(value)}, sort_keys=True)


def _plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(part, str) for part in value)
    return value is None or isinstance(value, str | int | float)
