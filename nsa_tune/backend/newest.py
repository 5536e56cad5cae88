"""A key's newest measurements, read out of a database by themselves, for speed."""

from __future__ import annotations

import sqlite3
from operator import itemgetter
from typing import Any

__all__ = ["newest_rows"]

_ROWS = (
    "SELECT point, batch, arm, status, latency_us, low_us, high_us, samples, error, reason, "
    "{discarded}, measured_at, measurements.id FROM measurements "
    "JOIN runs ON runs.id = run_id WHERE key_id = ? ORDER BY measurements.id"
)


def newest_rows(
    connection: sqlite3.Connection, number: int, discarded: str
) -> list[tuple[Any, ...]]:
    """What the view `newest` has for the key with this `number`, in half its time.

    `discarded` is the column with that name, or what stands for it.
    """
    rows = connection.execute(_ROWS.format(discarded=discarded), [number]).fetchall()
    if len({row[:3] for row in rows}) == len(rows):
        return rows
    found: dict[tuple[object, ...], tuple[Any, ...]] = {}
    for row in rows:
        known = found.get(row[:3])
        if known is None or known[-2] <= row[-2]:
            found[row[:3]] = row
    return sorted(found.values(), key=itemgetter(-1))
