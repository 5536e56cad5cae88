"""What each unit did in a run: a unit is one of the equal devices that shared its batches."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
    times_us: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    """By (point, batch, arm): what it took where other units measured the same."""


_UNIT = """
    INSERT INTO units (run_id, unit, node, batches, ratio) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (run_id, unit) DO UPDATE SET
        node = excluded.node, batches = excluded.batches, ratio = excluded.ratio
"""
_TIME = """
    INSERT INTO unit_times (run_id, unit, point, batch, arm, latency_us) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET latency_us = excluded.latency_us
"""


def put_units(connection: sqlite3.Connection, run: int, units: Sequence[UnitOfRun]) -> None:
    """Store what `units` did in `run` so far, in place of what was stored of them, within the
    caller's transaction. Times of other batches stay."""
    connection.executemany(
        _UNIT,
        [(run, unit.unit, unit.node, unit.batches, unit.ratio) for unit in units],
    )
    connection.executemany(
        _TIME,
        [(run, unit.unit, *cell, time) for unit in units for cell, time in unit.times_us.items()],
    )
