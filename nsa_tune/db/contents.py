"""What counts in a database or a text table, with the times of all: what is merged.

Read with the checks of `reader`, since it may be a stranger's file.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

from nsa_tune.backend.types.records import Key, Measurement, Table
from nsa_tune.db.connection import reading
from nsa_tune.db.reader import Limit, newest_limits, table_of, wanted_keys
from nsa_tune.db.text_table import format_row, read_text
from nsa_tune.db.values import text_of

_NEWEST_RUN = "SELECT max(started_at) FROM runs WHERE key_id = ?"


class Contents(NamedTuple):
    """What counts under one key."""

    table: Table
    began: str
    """When its newest run began. ISO 8601, UTC, as all times."""
    limits: tuple[Limit, ...]


def read_contents(path: Path) -> list[Contents]:
    """What `path` holds, a database or a text table, by key.

    Raises:
        StoreError: when it cannot be read.
    """
    if path.suffix == ".tsv":
        return [contents_of(read_text(path))]
    with reading(path) as (connection, version):
        found = [
            _read(connection, path, number, key, version)
            for number, key in (wanted_keys(connection) if version else [])
        ]
    return [contents for contents in found if contents.table.measurements or contents.limits]


def contents_of(table: Table) -> Contents:
    """The contents of a text table. Rows count as taken when its newest was, if it has no ages."""
    at = table.measured_at
    limits = tuple(
        Limit(name, value, "merged from a text table", at) for name, value in table.limits.items()
    )
    return Contents(table, at, limits)


def _read(
    connection: sqlite3.Connection, path: Path, number: int, key: Key, version: int
) -> Contents:
    table = table_of(connection, path, number, key, version)
    (began,) = connection.execute(_NEWEST_RUN, [number]).fetchone()
    limits = newest_limits(connection, number, version)
    return Contents(table, text_of(began), tuple(limits.values()))


def order_of(row: Measurement) -> tuple[str, int, str]:
    """Which of two measurements of one cell that were taken at the same time counts: the greater.

    Of those that are the same in a text table it is the one with more digits.
    """
    exact = repr(row)
    return format_row(row), len(exact), exact


def rows_that_count(table: Table, known: Table) -> list[tuple[str, Measurement]]:
    """(time, row) of each of `table` that counts more than what is `known` of its cell."""
    cells = {(row.point, row.batch, row.arm): row for row in known.measurements}
    found = []
    for row in table.measurements:
        at, other = table.time_of(row), cells.get((row.point, row.batch, row.arm))
        if other is None or _counts_more(at, row, known.time_of(other), other):
            found.append((at, row))
    return found


def _counts_more(at: str, row: Measurement, since: str, other: Measurement) -> bool:
    if at != since:
        return at > since
    return row != other and order_of(row) > order_of(other)
