"""The schema's steps: each whole or not at all, and recorded."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from nsa_tune._errors import StoreCorrupt
from nsa_tune.db import connection as opening
from nsa_tune.db import reader as tables
from nsa_tune.db.history import read_histories
from nsa_tune.db.rows import insert
from nsa_tune.db.schema import migrations
from nsa_tune.db.schema.migrations import MIGRATIONS, migrate
from nsa_tune.db.store import Store
from tests.records import DEVICE, KEY, ok, stored, table


def _schema(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        return {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master") if sql}


def _rows(connection: sqlite3.Connection, table: str) -> list[dict[str, Any]]:
    rows = connection.execute(f"SELECT * FROM {table}")
    names = [name for name, *_ in rows.description]
    return [dict(zip(names, row, strict=True)) for row in rows]


Older = Callable[[int], Path]


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Older:
    """Makes a database with one row, as the version with so many steps stored it."""

    def made(steps: int) -> Path:
        path = tmp_path / "nsa-tune.db"
        with monkeypatch.context() as earlier, closing(sqlite3.connect(path)) as db:
            earlier.setattr(migrations, "MIGRATIONS", MIGRATIONS[:steps])
            migrate(db, path)
            insert_first_schema_row(db)
        return path

    return made


def test_there_is_one_step_for_each_schema_version() -> None:
    assert len(MIGRATIONS) == opening.SCHEMA_VERSION


def test_the_steps_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "nsa-tune.db"
    Store.open(path).close()

    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT version, name FROM nsa_tune_migrations").fetchall()
    assert rows == [(i, name) for i, (name, _) in enumerate(MIGRATIONS, start=1)]
    assert rows[0] == (1, "first_schema")


def test_opening_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "nsa-tune.db"
    Store.open(path).close()
    before = path.read_bytes()

    Store.open(path).close()

    assert path.read_bytes() == before


def test_the_schema_is_frozen_by_its_names(tmp_path: Path) -> None:
    path = tmp_path / "nsa-tune.db"
    Store.open(path).close()

    with closing(sqlite3.connect(path)) as db:
        names = db.execute("SELECT type, name FROM sqlite_master").fetchall()
    assert [name for kind, name in names if kind == "table"] == [
        "nsa_tune_migrations", "keys", "devices", "runs", "measurements", "checks", "limits",
        "units",
    ]  # fmt: skip
    assert [name for kind, name in names if kind == "view"] == ["newest"]


def test_a_row_is_shown_with_its_full_key(tmp_path: Path) -> None:
    path = stored(tmp_path / "nsa-tune.db", table(ok("extend:0+128")))

    with closing(sqlite3.connect(path)) as db:
        (row,) = _rows(db, "newest")
    assert row["gpu"] == KEY.gpu
    assert row["libraries"] == '{"sgl-flash-mla": "1.0.0", "torch": "2.13.0"}'
    assert (row["batch"], row["latency_us"]) == ("extend:0+128", 100.0)


def test_a_step_that_fails_leaves_the_schema_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nsa-tune.db"
    Store.open(path).close()
    before = _schema(path)

    another = (
        "another",
        ("ALTER TABLE runs ADD COLUMN host TEXT", "CREATE TABLE runs (name TEXT)"),
    )

    monkeypatch.setattr(opening, "SCHEMA_VERSION", len(MIGRATIONS) + 1)
    monkeypatch.setattr(migrations, "MIGRATIONS", (*MIGRATIONS, another))
    with pytest.raises(StoreCorrupt, match="runs already exists"):
        Store.open(path)

    assert _schema(path) == before
    with closing(sqlite3.connect(path)) as db:
        assert opening.schema_version(db, path) == len(MIGRATIONS)


def test_a_step_that_another_process_has_done_is_not_done_again(tmp_path: Path) -> None:
    path = tmp_path / "nsa-tune.db"
    with closing(sqlite3.connect(path)) as one, closing(sqlite3.connect(path)) as other:
        migrate(one, path)
        migrate(other, path)

        assert len(_rows(other, "nsa_tune_migrations")) == len(MIGRATIONS)


def test_what_was_computed_from_measurements_goes_and_they_stay(older: Older) -> None:
    path = older(11)
    with closing(sqlite3.connect(path)) as db, db:
        # As earlier versions made them.
        db.execute("CREATE VIEW newest AS SELECT * FROM measurements")
        db.execute("CREATE VIEW v_regret AS SELECT * FROM newest")
        db.execute("CREATE VIEW v_winner AS SELECT * FROM v_regret")
        db.execute("CREATE TABLE models (name TEXT PRIMARY KEY, layers INTEGER)")
        db.execute("CREATE TABLE weights (key_id INTEGER PRIMARY KEY REFERENCES keys (id))")
        db.execute("INSERT INTO weights VALUES (1)")
        db.execute("CREATE TABLE unit_times (run_id INTEGER, unit TEXT, latency_us REAL)")
        db.execute("INSERT INTO unit_times VALUES (1, 'GPU-1', 2.0)")
    before = tables.read_database(path)

    Store.open(path).close()
    assert tables.read_database(path) == before
    assert len(before[0].measurements) == 1
    assert not [sql for sql in _schema(path) if "weights" in sql or "models" in sql]
    assert len([sql for sql in _schema(path) if sql.startswith("CREATE VIEW")]) == 1
    with closing(sqlite3.connect(path)) as db:
        assert len(_rows(db, "newest")) == len(_rows(db, "unit_times")) == 1


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))
def test_a_database_of_every_older_schema_is_read_and_then_takes_what_there_is_now(
    version: int, older: Older
) -> None:
    path = older(version)

    (table,) = tables.read_database(path)
    (history,) = read_histories(path)
    assert [row for _, row in history.runs[0].rows] == [*table.measurements]
    assert table.limits == {}
    assert [(row.discarded, row.pass_us) for row in table.measurements] == [(0, None)]
    row = replace(ok("extend:0+256"), discarded=6, pass_us=21.5)
    with Store.open(path) as store:
        assert tables.read_database(path) == [table]
        run = store.begin_run(KEY, DEVICE, {})
        store.add(run, [row])
        store.add_limits(run, {"rows": (7, "it ended")})
    with closing(sqlite3.connect(path)) as db:
        assert opening.schema_version(db, path) == len(MIGRATIONS)
    (table,) = tables.read_database(path)
    assert table.limits == {"rows": 7}
    assert row in table.measurements
    assert len(table.measurements) == 2


def insert_first_schema_row(db: sqlite3.Connection) -> None:
    """A measurement as the first schema's writer stored it."""
    key = {**asdict(KEY), "libraries": json.dumps(dict(KEY.libraries)), "digest": KEY.digest}
    insert(db, "keys", {"id": 1, **key})
    insert(db, "devices", {"id": 1, **asdict(DEVICE)})
    insert(
        db, "runs", {"id": 1, "key_id": 1, "device_id": 1, "arguments": "{}", "started_at": "2026"}
    )
    row = {**asdict(ok("extend:0+128")), "status": "ok", "run_id": 1, "measured_at": "2026"}
    del row["discarded"], row["pass_us"]
    insert(db, "measurements", row)
    db.commit()


@pytest.mark.parametrize("cost", [None, 0.0, 21.456789])
def test_the_cost_of_a_pass_is_kept_with_all_its_digits(tmp_path: Path, cost: float | None) -> None:
    row = replace(ok("extend:0+128"), pass_us=cost)
    path = stored(tmp_path / "nsa-tune.db", table(row))
    with Store.open(path) as store:
        assert store.table(KEY).measurements == (row,)
    with closing(sqlite3.connect(path)) as db:
        (shown,) = _rows(db, "newest")
    assert shown["pass_us"] == cost


@pytest.mark.parametrize("cost", [-1.0, float("inf")])
def test_a_cost_of_a_pass_that_cannot_be_is_refused(tmp_path: Path, cost: float) -> None:
    path = stored(tmp_path / "nsa-tune.db", table(ok("extend:0+128")))
    with closing(sqlite3.connect(path)) as connection, connection:
        if cost < 0:
            with pytest.raises(sqlite3.IntegrityError, match="pass_us"):
                connection.execute("UPDATE measurements SET pass_us = ?", [cost])
            connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("UPDATE measurements SET pass_us = ?", [cost])

    with pytest.raises(StoreCorrupt, match=r"a cost of .* us a pass cannot be"):
        tables.read_database(path)
