"""A database whose columns take values of any kind, or none, as a stranger may make it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

COLUMNS = {
    "keys": ("id", "digest", "gpu", "driver", "libraries", "model", "heads", "kv_layout",
             "protocol"),
    "devices": ("id", "name", "arch", "sms", "shared_memory_optin", "memory", "l2"),
    "runs": ("id", "key_id", "device_id", "arguments", "started_at", "ended_at", "outcome"),
    "measurements": ("id", "run_id", "point", "batch", "arm", "status", "latency_us", "low_us",
                     "high_us", "samples", "error", "reason", "measured_at", "discarded",
                     "pass_us"),
    "limits": ("run_id", "name", "value", "past", "found_at"),
    "checks": ("digest", "driver", "libraries", "checked_at", "holds", "drift", "anchors"),
    "nsa_tune_migrations": ("version", "name"),
}  # fmt: skip
"""By table, the columns that readers use."""


def loosen(path: Path) -> None:
    """Make the tables of the database `path` anew, without constraints and types."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        for table in COLUMNS:
            rows = connection.execute(f"SELECT * FROM {table}")
            names = [name for name, *_ in rows.description]
            kept = rows.fetchall()
            connection.execute(f"DROP TABLE {table}")
            connection.execute(f"CREATE TABLE {table} ({', '.join(names)})")
            marks = ", ".join("?" * len(names))
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", kept)
        connection.commit()
