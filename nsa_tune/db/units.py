"""What each unit did in a run: a unit is one of the equal devices that shared its batches."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitOfRun:
    """What one unit did."""

    unit: str
    """A GPU's UUID, or the name of a CPU."""
    node: str
    """Name of its node in a cluster; empty on the host of the run."""
    batches: int
    """That it measured for the table."""
    ratio: float | None
    """Its time over the other units' on the same batches; None for a single unit."""


_UNIT = """
    INSERT INTO units (run_id, unit, node, batches, ratio) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (run_id, unit) DO UPDATE SET
        node = excluded.node, batches = excluded.batches, ratio = excluded.ratio
"""


def put_units(connection: sqlite3.Connection, run: int, units: Sequence[UnitOfRun]) -> None:
    """Store what `units` did in `run` so far, in place of what was stored of them, within the
    caller's transaction."""
    connection.executemany(
        _UNIT,
        [(run, unit.unit, unit.node, unit.batches, unit.ratio) for unit in units],
    )
