"""The schema, as the steps that made it. A released step is never edited: a change is a new one."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from nsa_tune.backend.types.profiles import PROFILES
from nsa_tune.db.connection import schema_version
from nsa_tune.db.rows import insert, insert_all
from nsa_tune.db.schema.views import REGRET, SPREAD, VIEWS


def first_schema(connection: sqlite3.Connection) -> None:
    """Keys, devices, runs, measurements, and `newest`: what counts, each row with its full key."""
    for statement in _FIRST_SCHEMA:
        connection.execute(statement)


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
    # measured_at, not id: importing an old table must not hide newer measurements.
    """
    CREATE VIEW newest AS
    SELECT measurement_id, run_id, key_id, gpu, driver, libraries, model, heads, kv_layout,
        protocol, point, batch, arm, status, latency_us, low_us, high_us, samples, error, reason,
        measured_at
    FROM (
        SELECT measurements.id AS measurement_id, measurements.*, runs.key_id,
            row_number() OVER (
                PARTITION BY runs.key_id, point, batch, arm
                ORDER BY measured_at DESC, measurements.id DESC
            ) AS place
        FROM measurements JOIN runs ON runs.id = measurements.run_id
    ) JOIN keys ON keys.id = key_id
    WHERE place = 1
    """,
)


def probed_limits(connection: sqlite3.Connection) -> None:
    """Limits that probes found; of one key and name the newest counts."""
    connection.execute(_PROBED_LIMITS)


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


def views(connection: sqlite3.Connection) -> None:
    """v_regret, v_winner, v_limits and v_crossover, over what `newest` shows."""
    for statement in VIEWS:
        connection.execute(statement)


def discarded_samples_and_checks(connection: sqlite3.Connection) -> None:
    """How many samples a measurement threw away, and what `nsa-tune check` found."""
    for statement in _DISCARDED_AND_CHECKS:
        connection.execute(statement)


_DISCARDED_AND_CHECKS = (
    "ALTER TABLE measurements ADD COLUMN discarded INTEGER NOT NULL DEFAULT 0",
    "DROP VIEW newest",
    """
    CREATE VIEW newest AS
    SELECT measurement_id, run_id, key_id, gpu, driver, libraries, model, heads, kv_layout,
        protocol, point, batch, arm, status, latency_us, low_us, high_us, samples, error, reason,
        measured_at, discarded
    FROM (
        SELECT measurements.id AS measurement_id, measurements.*, runs.key_id,
            row_number() OVER (
                PARTITION BY runs.key_id, point, batch, arm
                ORDER BY measured_at DESC, measurements.id DESC
            ) AS place
        FROM measurements JOIN runs ON runs.id = measurements.run_id
    ) JOIN keys ON keys.id = key_id
    WHERE place = 1
    """,
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


def fitted_weights(connection: sqlite3.Connection) -> None:
    """What was fitted to a key's measurements, and to which."""
    connection.execute(_WEIGHTS)


_WEIGHTS = """
    CREATE TABLE weights (
        key_id INTEGER PRIMARY KEY REFERENCES keys (id),
        rows INTEGER NOT NULL,  -- measurements of the key when it was fitted
        newest_id INTEGER NOT NULL,  -- the last of them
        stamp TEXT NOT NULL,  -- what the fit depends on besides
        points TEXT NOT NULL,  -- JSON: decision point to text
        measured_at TEXT NOT NULL,  -- of the newest measurement
        fitted_at TEXT NOT NULL  -- both ISO 8601, UTC
    )
    """


def costs_of_a_pass(connection: sqlite3.Connection) -> None:
    """What an arm takes once a pass, apart from what it takes in each layer."""
    for statement in _COSTS_OF_A_PASS:
        connection.execute(statement)


_COSTS_OF_A_PASS = (
    "ALTER TABLE measurements ADD COLUMN pass_us REAL CHECK (pass_us IS NULL OR pass_us >= 0)",
    "DROP VIEW newest",
    """
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
    """,
)


def layers_of_models(connection: sqlite3.Connection) -> None:
    """How many layers of a model share the cost of a pass, and views that go by it."""
    connection.execute(_MODELS)
    known = {str(name) for (name,) in connection.execute("SELECT DISTINCT model FROM keys")}
    rows = [
        {"name": name, "layers": PROFILES[name].alike} for name in sorted(known & set(PROFILES))
    ]
    insert_all(connection, "models", rows)
    connection.execute("DROP VIEW v_regret")
    connection.execute(REGRET)


_MODELS = """
    CREATE TABLE models (
        name TEXT PRIMARY KEY,  -- as in keys.model
        layers INTEGER NOT NULL CHECK (layers > 0)  -- that share what is computed once a pass
    )
    """


def manifests(connection: sqlite3.Connection) -> None:
    """Digests of what tables hold."""
    connection.execute(_MANIFESTS)


_MANIFESTS = """
    CREATE TABLE manifests (
        key_id INTEGER PRIMARY KEY REFERENCES keys (id),
        newest_id INTEGER NOT NULL,  -- the last measurement that is covered
        newest_run INTEGER NOT NULL,  -- the last run
        newest_limit INTEGER NOT NULL,  -- the last limit
        content TEXT NOT NULL  -- digest of all that is covered
    )
    """


def manifests_of_heads(connection: sqlite3.Connection) -> None:
    """Digests of a table's head."""
    connection.execute("ALTER TABLE manifests ADD COLUMN head TEXT NOT NULL DEFAULT ''")


def units_of_runs(connection: sqlite3.Connection) -> None:
    """What each of the equal devices of a run did, and how far they are apart."""
    for statement in (*_UNITS, SPREAD):
        connection.execute(statement)


_UNITS = (
    """
    CREATE TABLE units (
        run_id INTEGER NOT NULL REFERENCES runs (id),
        unit TEXT NOT NULL,  -- a GPU's UUID, or the name of a CPU
        node TEXT NOT NULL,  -- of the cluster; empty on the host of the run
        batches INTEGER NOT NULL,  -- that it measured for the table
        ratio REAL,  -- its time over the other units'; NULL for a single one
        PRIMARY KEY (run_id, unit)
    )
    """,
    # The batches that several units measured; of each one row is in the table of measurements.
    """
    CREATE TABLE unit_times (
        run_id INTEGER NOT NULL,
        unit TEXT NOT NULL,
        point TEXT NOT NULL,
        batch TEXT NOT NULL,
        arm TEXT NOT NULL,
        latency_us REAL NOT NULL CHECK (latency_us > 0),
        PRIMARY KEY (run_id, unit, point, batch, arm),
        FOREIGN KEY (run_id, unit) REFERENCES units (run_id, unit)
    )
    """,
)


def measurements_only(connection: sqlite3.Connection) -> None:
    """Drop what was computed from measurements: fitted weights, and digests that covered them."""
    connection.execute("DROP TABLE weights")
    connection.execute("DROP TABLE manifests")


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (
    first_schema,
    views,
    discarded_samples_and_checks,
    probed_limits,
    fitted_weights,
    costs_of_a_pass,
    layers_of_models,
    manifests,
    manifests_of_heads,
    units_of_runs,
    measurements_only,
)
"""Step i makes schema i + 1."""


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring a database to the newest schema, each step in one transaction with the row that records
    it.

    Raises:
        StoreNewer: when a newer nsa-tune wrote it; nothing is changed then.
        StoreCorrupt: when it is not nsa-tune's; nothing is changed then.
    """
    for version, step in enumerate(MIGRATIONS, 1):
        if schema_version(connection, path) >= version:
            continue
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            # Again, under the write lock: another process may have done it in the meantime.
            if schema_version(connection, path) < version:
                step(connection)
                now = datetime.now(UTC).isoformat()
                row = {"version": version, "name": step.__name__, "applied_at": now}
                insert(connection, "nsa_tune_migrations", row)
