"""Manifests of tables in databases: what was changed is not read."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune._errors import StoreCorrupt
from nsa_tune.backend.costmodel import weights
from nsa_tune.backend.dispatch.refit import refit
from nsa_tune.db.exchange import import_text
from nsa_tune.db.reader import Wanted, find_stored, keys_in, read_database
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


IN_ROWS = (
    "UPDATE measurements SET latency_us = 1.5 * latency_us WHERE id = 3",
    "UPDATE measurements SET low_us = 0.999 * low_us WHERE id = 3",
    "UPDATE measurements SET arm = 'mha/fa2' WHERE id = 3",
    "UPDATE measurements SET batch = 'extend:0+2' WHERE id = 1",
    "UPDATE measurements SET pass_us = 3 WHERE id = 1",
    "DELETE FROM measurements WHERE id = 3",
    "UPDATE manifests SET content = 'nothing'",
)
IN_HEAD = (
    "UPDATE keys SET driver = '999'",
    "UPDATE devices SET memory = memory + 1",
    "UPDATE limits SET value = 4",
    "DELETE FROM limits",
    "UPDATE weights SET points = replace(points, '1', '2')",
    "UPDATE weights SET stamp = 'other'",
)


@pytest.mark.parametrize("change", [*IN_HEAD, "UPDATE manifests SET head = 'nothing'"])
def test_a_table_whose_head_was_changed_is_not_opened(
    change: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _change(path, change)

    assert str(path) not in _opened(path).source
    assert "that was changed since it was measured" in caplog.text


@pytest.mark.parametrize("change", [*IN_ROWS, *IN_HEAD])
def test_measurements_of_a_table_that_was_changed_are_not_read(change: str, path: Path) -> None:
    _change(path, change)

    with pytest.raises(StoreCorrupt, match="that was changed since it was measured"):
        read_database(path)


@pytest.mark.parametrize("change", IN_ROWS)
def test_weights_plan_as_before_while_changed_measurements_say_nothing(
    change: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = _opened(path)
    _change(path, change)
    after = _opened(path)

    assert str(path) in after.source
    batch = Batch.extend([6], [1])
    assert after.plan(batch) == before.plan(batch)
    assert before.policies["prefill"].estimates(batch) == {}
    assert after.policies["prefill"].estimates(batch) == {}
    assert "that was changed since it was measured" in caplog.text
    with pytest.raises(StoreCorrupt, match="that was changed"):
        _ = after.table


@pytest.mark.parametrize("change", IN_ROWS)
def test_models_are_not_fitted_to_changed_measurements(
    change: str, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights, "_VERSION", weights._VERSION + 1)
    assert str(path) in _opened(path).source
    _change(path, change)

    # The next source answers: the table of this GPU that ships.
    assert _opened(path).source.startswith("shipped:h100")
    assert "that was changed since it was measured" in caplog.text


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
    _older(path, 7, "DROP TABLE manifests")
    assert len(read_database(path)) == 1

    Store.open(path).close()

    assert len(read_database(path)) == 1
    assert str(path) in _opened(path).source
    _change(path, IN_ROWS[0])
    with pytest.raises(StoreCorrupt, match="that was changed"):
        read_database(path)


def test_a_manifest_without_a_digest_of_the_head_covers_all(path: Path) -> None:
    _older(path, 8, "ALTER TABLE manifests DROP COLUMN head")
    assert str(path) in _opened(path).source

    _change(path, IN_ROWS[0])
    assert str(path) not in _opened(path).source

    # An upgrade does not hide it.
    Store.open(path).close()
    assert str(path) not in _opened(path).source
    with pytest.raises(StoreCorrupt, match="that was changed"):
        read_database(path)


def _older(path: Path, version: int, statement: str) -> None:
    for later in ("VIEW v_spread", "TABLE unit_times", "TABLE units"):
        _change(path, f"DROP {later}")
    _change(path, statement)
    _change(path, f"DELETE FROM nsa_tune_migrations WHERE version > {version}")


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


def test_the_keys_of_a_file_are_told_without_its_measurements(path: Path, tmp_path: Path) -> None:
    with Store.open(path) as store:
        # A run that has measured nothing yet makes no table.
        store.begin_run(replace(KEY, heads=16), DEVICE, {})
    _change(path, IN_ROWS[0])
    assert keys_in(path) == [KEY]

    text = tmp_path / "a.tsv"
    text.write_text(format_table(table(*ROWS)))
    assert keys_in(text) == [KEY]
    empty = tmp_path / "empty.db"
    empty.touch()
    assert keys_in(empty) == []
