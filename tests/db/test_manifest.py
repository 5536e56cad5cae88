"""Manifests of tables in databases: a change is noticed when the table is opened."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune import Dispatcher
from nsa_tune._errors import StoreCorrupt
from nsa_tune.backend.dispatch.refit import refit
from nsa_tune.db.exchange import import_text
from nsa_tune.db.reader import Wanted, find_stored, read_database
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import format_table
from tests.records import DEVICE, KEY, ok, table

ROWS = [ok(f"extend:{i}+1", arm) for i in range(8) for arm in ("mha/fa3", "mla/flashmla_sparse")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with a table of two runs, with weights and a limit."""
    path = tmp_path / "a.db"
    with Store.open(path) as store:
        for rows in (ROWS[:8], ROWS[8:]):
            run = store.begin_run(KEY, DEVICE, {})
            store.add(run, rows)
            store.add_limits(run, {"deep_gemm_next_n": (2, "")})
            store.end_run(run, "done")
        refit(store, KEY)
    return path


def _change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(statement)
        connection.commit()


def _opened(path: Path) -> Dispatcher:
    return Dispatcher.open(path, KEY.gpu, model=KEY.model, heads=KEY.heads, kv_dtype="fp8")


def test_a_table_as_it_was_measured_is_opened(path: Path) -> None:
    assert str(path) in _opened(path).source
    assert len(read_database(path)[0].measurements) == len(ROWS)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE measurements SET latency_us = 1.5 * latency_us WHERE id = 3",
        "UPDATE measurements SET low_us = 0.999 * low_us WHERE id = 3",
        "UPDATE measurements SET arm = 'mha/fa2' WHERE id = 3",
        "UPDATE measurements SET batch = 'extend:0+2' WHERE id = 1",
        "UPDATE measurements SET pass_us = 3 WHERE id = 1",
        "DELETE FROM measurements WHERE id = 3",
        "UPDATE keys SET driver = '999'",
        "UPDATE devices SET memory = memory + 1",
        "UPDATE limits SET value = 4",
        "UPDATE weights SET points = replace(points, '1', '2')",
        "UPDATE manifests SET content = 'nothing'",
    ],
)
def test_a_table_that_was_changed_is_refused(
    change: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _change(path, change)

    assert str(path) not in _opened(path).source
    assert "that was changed since it was measured" in caplog.text
    with pytest.raises(StoreCorrupt, match="that was changed since it was measured"):
        read_database(path)


def test_the_other_tables_of_the_database_are_used(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(KEY, heads=16)
    with Store.open(path) as store:
        run = store.begin_run(other, DEVICE, {})
        store.add(run, ROWS)
        store.end_run(run, "done")
    _change(path, "UPDATE measurements SET latency_us = 3 WHERE id = 3")

    assert [one.key.heads for one in read_database(path)] == [16]
    assert "that was changed since it was measured" in caplog.text


def test_rows_of_a_run_that_goes_on_are_used(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(KEY, DEVICE, {})
        store.add(run, [ok("extend:100+1")])
        store.add_limits(run, {"deep_gemm_next_n": (1, "")})

        (found,) = read_database(path)
        assert len(found.measurements) == len(ROWS) + 1
        assert str(path) in _opened(path).source


def test_a_run_over_a_changed_table_does_not_hide_the_change(path: Path) -> None:
    _change(path, "UPDATE measurements SET latency_us = 3 WHERE id = 3")
    with Store.open(path) as store:
        run = store.begin_run(KEY, DEVICE, {})
        store.add(run, [ok("extend:100+1")])
        store.end_run(run, "done")

    with pytest.raises(StoreCorrupt, match="that was changed"):
        read_database(path)


def test_an_older_database_gets_its_manifests_when_it_is_upgraded(path: Path) -> None:
    _change(path, "DROP TABLE manifests")
    _change(path, "DELETE FROM nsa_tune_migrations WHERE version = 8")
    assert len(read_database(path)) == 1

    Store.open(path).close()

    assert len(read_database(path)) == 1
    assert str(path) in _opened(path).source
    _change(path, "UPDATE measurements SET latency_us = 3 WHERE id = 3")
    with pytest.raises(StoreCorrupt, match="that was changed"):
        read_database(path)


def test_a_table_without_a_manifest_is_read(path: Path) -> None:
    _change(path, "DELETE FROM manifests")
    _change(path, "UPDATE measurements SET latency_us = 3 WHERE id = 3")

    assert len(read_database(path)[0].measurements) == len(ROWS)


def test_an_imported_table_has_a_manifest(tmp_path: Path) -> None:
    text = tmp_path / "a.tsv"
    text.write_text(format_table(table(*ROWS)))
    path = tmp_path / "b.db"
    with Store.open(path) as store:
        import_text(store, text)
        refit(store, KEY)
    (found,) = next(find_stored(path, Wanted(KEY.gpu, KEY.model, KEY.heads, KEY.kv_layout)))
    assert found.weights is not None

    _change(path, "UPDATE measurements SET latency_us = 3 WHERE id = 3")

    with pytest.raises(StoreCorrupt, match="that was changed"):
        read_database(path)
