"""A key's newest measurements, read out of a database by themselves, for speed."""

from __future__ import annotations

import sqlite3
from operator import itemgetter
from typing import Any

__all__ = ["newest_columns"]

_ROWS = (
    "SELECT point, batch, arm, status, latency_us, low_us, high_us, samples, error, reason, "
    "{discarded}, {pass_us}, measured_at{id} FROM measurements JOIN runs ON runs.id = run_id "
    "WHERE key_id = ?"
)
_WIDTH = 13


def newest_columns(
    connection: sqlite3.Connection, number: int, discarded: str, pass_us: str
) -> list[tuple[Any, ...]]:
    """What the view `newest` has for the key with this `number`, in a third of its time, in any
    order: the fields of a measurement column by column, and when each was measured.

    `discarded` and `pass_us` are the columns with these names, or what stands for them.

    Raises:
        ValueError: when the newest of several rows cannot be told.
    """
    rows = connection.execute(
        _ROWS.format(discarded=discarded, pass_us=pass_us, id=""), [number]
    ).fetchall()
    columns = list(zip(*rows, strict=True)) or [()] * _WIDTH
    if len({*zip(*columns[:3], strict=True)}) == len(rows):
        return columns
    if not all(isinstance(time, str) for time in columns[-1]):
        raise ValueError("a time of measurement that is no text")
    query = _ROWS.format(discarded=discarded, pass_us=pass_us, id=", measurements.id")
    found = {
        row[:3]: row[:_WIDTH]
        for row in sorted(connection.execute(query, [number]), key=itemgetter(-2, -1))
    }
    return list(zip(*found.values(), strict=True))
