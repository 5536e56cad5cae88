"""What a database says of its runs, read without changing it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune._errors import NoTunedData, StoreCorrupt, StoreMissing
from nsa_tune.db.runs import newest_of, run_table, runs_of, state_of
from nsa_tune.db.store import Store
from tests.records import DEVICE, KEY, failed, ok


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "some.db"
    with Store.open(path) as store:
        one = store.begin_run(KEY, DEVICE, {"points": ["prefill"]})
        store.add(one, [ok("extend:0+1", latency_us=10), ok("extend:0+2", latency_us=20)])
        store.end_run(one, "done")
        two = store.begin_run(KEY, DEVICE, {"fresh": True})
        store.add(two, [ok("extend:0+1", latency_us=11)])
        store.add(two, [failed("extend:0+4", "mha/fa3", "boom")])
        store.begin_run(KEY, DEVICE, {})
    return path


def test_runs_come_newest_first_with_what_they_did(database: Path) -> None:
    runs = runs_of(database)

    assert [run.number for run in runs] == [3, 2, 1]
    assert [(run.measurements, run.failed) for run in runs] == [(0, 0), (2, 1), (2, 0)]
    assert [run.outcome for run in runs] == [None, None, "done"]
    assert runs[1].arguments == {"fresh": True}
    assert {run.digest for run in runs} == {KEY.digest}
    assert (runs[0].measured_at, runs[0].ended_at) == (None, None)


def test_the_newest_measurements_and_the_failures_among_them(database: Path) -> None:
    assert [one.batch for one in newest_of(database, 2)] == ["extend:0+4", "extend:0+1"]
    (failure,) = newest_of(database, failed=True)
    assert (failure.run, failure.arm, failure.reason) == (2, "mha/fa3", "boom")


def test_a_runs_table_holds_what_that_run_measured(database: Path) -> None:
    first, second = run_table(database, 1), run_table(database, 2)

    assert [row.latency_us for row in first.measurements] == [10, 20]
    assert [row.batch for row in second.measurements] == ["extend:0+1", "extend:0+4"]
    assert (first.key, first.device) == (KEY, DEVICE)
    assert second.source == f"{database}@run:2"


def test_a_runs_table_keeps_the_cost_of_a_pass(database: Path) -> None:
    row = replace(ok("extend:0+64"), pass_us=21.5, discarded=3)
    with Store.open(database) as store:
        store.add(3, [row])

    assert run_table(database, 3).measurements == (row,)


@pytest.mark.parametrize("number", [3, 4])
def test_a_run_without_measurements_is_no_table(database: Path, number: int) -> None:
    with pytest.raises(NoTunedData, match=f"no run {number} that measured something"):
        run_table(database, number)


def test_the_state_changes_with_every_measurement_and_every_end(database: Path) -> None:
    states = [state_of(database)]
    with Store.open(database) as store:
        store.add(3, [ok("extend:0+8")])
        states.append(state_of(database))
        store.end_run(3, "done")
        states.append(state_of(database))

    assert len(set(states)) == 3


def test_reading_changes_nothing(database: Path) -> None:
    before = database.read_bytes()

    state_of(database), runs_of(database), newest_of(database), run_table(database, 1)

    assert database.read_bytes() == before


def test_a_missing_and_an_empty_database_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "empty.db").write_bytes(b"")

    with pytest.raises(StoreMissing):
        runs_of(tmp_path / "none.db")
    with pytest.raises(NoTunedData, match="nsa-tune run"):
        runs_of(tmp_path / "empty.db")


def test_damaged_arguments_are_named(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE runs SET arguments = '{' WHERE id = 1")

    with pytest.raises(StoreCorrupt, match="damaged"):
        runs_of(database)
