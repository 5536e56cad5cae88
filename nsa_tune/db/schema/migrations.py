"""The schema, as the steps that make it out of each older one. A change is a new step."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from pathlib import Path

from nsa_tune.db.connection import schema_version
from nsa_tune.db.rows import insert

_FIRST_SCHEMA = (
    """
    CREATE TABLE nsa_tune_migrations (
        version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE keys (
        id INTEGER PRIMARY KEY,
        digest TEXT NOT NULL UNIQUE,
        gpu TEXT NOT NULL,
        driver TEXT NOT NULL,
        libraries TEXT NOT NULL,  -- JSON: distribution to version
        model TEXT NOT NULL,
        heads INTEGER NOT NULL,  -- local heads
        kv_layout TEXT NOT NULL,
        protocol TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE devices (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        arch TEXT NOT NULL,
        sms INTEGER NOT NULL,
        shared_memory_optin INTEGER NOT NULL,  -- bytes, as memory and l2
        memory INTEGER NOT NULL,
        l2 INTEGER NOT NULL,
        UNIQUE (name, arch, sms, shared_memory_optin, memory, l2)
    )
    """,
    """
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY,
        key_id INTEGER NOT NULL REFERENCES keys (id),
        device_id INTEGER NOT NULL REFERENCES devices (id),
        arguments TEXT NOT NULL,  -- JSON
        started_at TEXT NOT NULL,  -- ISO 8601, UTC
        ended_at TEXT,  -- NULL, as outcome: running or killed
        outcome TEXT CHECK (outcome IN ('done', 'interrupted', 'budget'))
    )
    """,
    """
    CREATE TABLE measurements (
        id INTEGER PRIMARY KEY,
        run_id INTEGER NOT NULL REFERENCES runs (id),
        point TEXT NOT NULL,
        batch TEXT NOT NULL,
        arm TEXT NOT NULL,
        status TEXT NOT NULL CHECK (status IN ('ok', 'failed', 'wrong')),
        latency_us REAL,
        low_us REAL,
        high_us REAL,
        samples INTEGER NOT NULL,
        error REAL,
        reason TEXT NOT NULL,
        measured_at TEXT NOT NULL,  -- ISO 8601, UTC
        CHECK (status <> 'ok' OR min(coalesce(latency_us, 0), coalesce(low_us, 0),
            coalesce(high_us, 0)) > 0)
    )
    """,
    "CREATE INDEX measurements_of_run ON measurements (run_id, point, batch, arm)",
    "CREATE INDEX runs_of_key ON runs (key_id)",
)

_DISCARDED_AND_CHECKS = (
    "ALTER TABLE measurements ADD COLUMN discarded INTEGER NOT NULL DEFAULT 0",
    # The digest, not a key's id: a table that came with the package is in no database.
    """
    CREATE TABLE checks (
        id INTEGER PRIMARY KEY,
        digest TEXT NOT NULL,  -- of the key of the table that was checked
        driver TEXT NOT NULL,  -- of the machine it was checked on, as libraries
        libraries TEXT NOT NULL,  -- JSON: distribution to version, sorted
        checked_at TEXT NOT NULL,  -- ISO 8601, UTC
        holds INTEGER NOT NULL CHECK (holds IN (0, 1)),
        drift REAL NOT NULL,  -- median over the anchors of here / table, minus 1
        anchors TEXT NOT NULL  -- JSON: what each anchor took, there and here
    )
    """,
    "CREATE INDEX checks_of_key ON checks (digest, checked_at)",
)

_PROBED_LIMITS = """
    CREATE TABLE limits (
        id INTEGER PRIMARY KEY,
        run_id INTEGER NOT NULL REFERENCES runs (id),
        name TEXT NOT NULL,
        value INTEGER NOT NULL CHECK (value >= 0),
        past TEXT NOT NULL,  -- what happened behind it
        found_at TEXT NOT NULL  -- ISO 8601, UTC
    )
    """

_COST_OF_A_PASS = (
    "ALTER TABLE measurements ADD COLUMN pass_us REAL CHECK (pass_us IS NULL OR pass_us >= 0)"
)

_UNITS = """
    CREATE TABLE units (
        run_id INTEGER NOT NULL REFERENCES runs (id),
        unit TEXT NOT NULL,  -- a GPU's UUID, or the name of a CPU
        node TEXT NOT NULL,  -- of the cluster; empty on the host of the run
        batches INTEGER NOT NULL,  -- that it measured for the table
        ratio REAL,  -- its time over the other units'; NULL for a single one
        PRIMARY KEY (run_id, unit)
    )
    """

# measured_at, not id: importing an old table must not hide newer measurements.
_NEWEST = """
    CREATE VIEW newest AS
    SELECT measurement_id, run_id, key_id, gpu, driver, libraries, model, heads, kv_layout,
        protocol, point, batch, arm, status, latency_us, low_us, high_us, samples, error, reason,
        measured_at, discarded, pass_us
    FROM (
        SELECT measurements.id AS measurement_id, measurements.*, runs.key_id,
            row_number() OVER (
                PARTITION BY runs.key_id, point, batch, arm
                ORDER BY measured_at DESC, measurements.id DESC
            ) AS place
        FROM measurements JOIN runs ON runs.id = measurements.run_id
    ) JOIN keys ON keys.id = key_id
    WHERE place = 1
    """

# What earlier versions computed from measurements is dropped; their table `unit_times` holds
# measured times, and stays.
_MEASUREMENTS_ONLY = (
    "DROP VIEW IF EXISTS v_spread",
    "DROP VIEW IF EXISTS v_crossover",
    "DROP VIEW IF EXISTS v_limits",
    "DROP VIEW IF EXISTS v_winner",
    "DROP VIEW IF EXISTS v_regret",
    "DROP VIEW IF EXISTS newest",
    "DROP TABLE IF EXISTS models",
    "DROP TABLE IF EXISTS manifests",
    "DROP TABLE IF EXISTS weights",
    _NEWEST,
)

_DROPPED = ("dropped_later", ())
"""What earlier versions made in this step, the last one drops."""

MIGRATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("first_schema", _FIRST_SCHEMA),
    _DROPPED,
    ("discarded_samples_and_checks", _DISCARDED_AND_CHECKS),
    ("probed_limits", (_PROBED_LIMITS,)),
    _DROPPED,
    ("costs_of_a_pass", (_COST_OF_A_PASS,)),
    _DROPPED,
    _DROPPED,
    _DROPPED,
    ("units_of_runs", (_UNITS,)),
    _DROPPED,
    ("measurements_only", _MEASUREMENTS_ONLY),
)
"""Step i makes schema i + 1: its name, and its statements."""


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring a database to the newest schema, each step in one transaction with the row that records
    it.

    Raises:
        StoreNewer: when a newer nsa-tune wrote it; nothing is changed then.
        StoreCorrupt: when it is not nsa-tune's; nothing is changed then.
    """
    for version, (name, statements) in enumerate(MIGRATIONS, 1):
        if schema_version(connection, path) >= version:
            continue
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            # Again, under the write lock: another process may have done it in the meantime.
            if schema_version(connection, path) < version:
                for statement in statements:
                    connection.execute(statement)
                now = datetime.now(UTC).isoformat()
                row = {"version": version, "name": name, "applied_at": now}
                insert(connection, "nsa_tune_migrations", row)
