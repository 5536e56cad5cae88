"""Rows as mappings, put into tables whose names and columns are nsa-tune's."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence


def insert(connection: sqlite3.Connection, table: str, row: Mapping[str, object]) -> int:
    """Add `row` to `table`; its id."""
    number = connection.execute(_statement(table, row), tuple(row.values())).lastrowid
    assert number is not None, "a row was inserted"
    return number


def insert_all(
    connection: sqlite3.Connection, table: str, rows: Sequence[Mapping[str, object]]
) -> None:
    """Add `rows`, which have the same columns in the same order, to `table`."""
    if rows:
        statement = _statement(table, rows[0])
        connection.executemany(statement, [tuple(row.values()) for row in rows])


def id_of(connection: sqlite3.Connection, table: str, row: Mapping[str, object]) -> int:
    """The id of `row` in `table`, put there where it is new."""
    where = " AND ".join(f"{column} = ?" for column in row)
    query = f"SELECT id FROM {table} WHERE {where}"
    stored = connection.execute(query, tuple(row.values())).fetchone()
    return insert(connection, table, row) if stored is None else int(stored[0])


def _statement(table: str, row: Mapping[str, object]) -> str:
    return f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
