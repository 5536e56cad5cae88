"""The store: what it keeps, and what it says about files that it cannot use."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings

from nsa_tune._errors import NoTunedData, StoreCorrupt, StoreError
from nsa_tune.backend.types.records import Status, Table
from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store
from tests.records import DEVICE, KEY, failed, ok, stored, table, tables


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a database may be made."""
    return tmp_path / "data" / "nsa-tune.db"


def test_what_was_added_is_read_back(path: Path) -> None:
    rows = (ok("extend:0+128"), failed("extend:0+128", "mla", "no kernel\twith tabs\n"))

    stored(path, table(*rows))

    with Store.open(path) as store:
        found = store.table(KEY)
    assert (found.key, found.device, found.measurements) == (KEY, DEVICE, rows)
    assert found.source == str(path)
    assert found.measured_at.endswith("+00:00")
    assert read_database(path) == [found]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(original=tables())
def test_any_table_survives_the_database(original: Table, path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(original.key, original.device, {})
        store.add(run, original.measurements)
        read = store.table(original.key)

        assert set(read.measurements) >= set(original.measurements)
        assert (read.key, read.device) == (original.key, original.device)


def test_the_newest_row_counts_and_the_older_one_stays(path: Path) -> None:
    stored(path, table(ok("extend:0+128", latency_us=100.0), ok("extend:0+256")))
    stored(path, table(ok("extend:0+128", latency_us=90.0)))

    with Store.open(path) as store:
        latencies = {row.batch: row.latency_us for row in store.table(KEY).measurements}
    assert latencies == {"extend:0+128": 90.0, "extend:0+256": 100.0}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM measurements").fetchone() == (3,)


def test_a_row_measured_earlier_does_not_hide_a_newer_one(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(KEY, DEVICE, {})
        store.add(run, [ok("extend:0+128", latency_us=90.0)])
        with patch("nsa_tune.db.store._now", lambda: "2020-01-01T00:00:00.000000+00:00"):
            store.add(run, [ok("extend:0+128", latency_us=100.0)])

        assert [row.latency_us for row in store.table(KEY).measurements] == [90.0]


def test_what_counts_now_comes_oldest_first(path: Path) -> None:
    """Three failures before a first success put an arm out, not three after it."""
    with Store.open(path) as store:
        run = store.begin_run(KEY, DEVICE, {})
        for batch in ("extend:64+64", "extend:0+1", "extend:0+3", "extend:0+2"):
            store.add(run, [ok(batch)])
        store.add(run, [ok("extend:0+3")])

        assert [row.batch for row in store.current(KEY)] == [
            "extend:64+64", "extend:0+1", "extend:0+2", "extend:0+3",
        ]  # fmt: skip


def test_rows_whose_order_cannot_be_told_are_damage(path: Path) -> None:
    stored(path, table(ok("extend:0+128")))
    stored(path, table(ok("extend:0+128")))
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE measurements SET measured_at = x'05' WHERE id = 1")
        db.commit()

    with pytest.raises(StoreCorrupt, match="a time of measurement that is no text"):
        read_database(path)


def test_keys_do_not_mix(path: Path) -> None:
    other = replace(KEY, libraries=(("torch", "2.14.0"),))
    stored(path, table(ok("extend:0+128")))
    stored(path, table(ok("extend:0+256"), key=other))
    with Store.open(path) as store:
        assert [one.key for one in read_database(store.path)] == [KEY, other]
        assert [row.batch for row in store.table(other).measurements] == ["extend:0+256"]


def test_a_run_without_measurements_has_an_empty_table_and_is_not_listed(path: Path) -> None:
    with Store.open(path) as store:
        store.begin_run(KEY, DEVICE, {})

        assert store.table(KEY).measurements == ()
        assert read_database(store.path) == []
    assert read_database(path) == []


def test_an_unknown_key_is_no_tuned_data(path: Path) -> None:
    with Store.open(path) as store, pytest.raises(NoTunedData, match="nsa-tune run"):
        store.table(KEY)


def test_a_run_notes_its_arguments_and_its_end(path: Path) -> None:
    with Store.open(path) as store:
        done = store.begin_run(KEY, DEVICE, {"heads": 128, "database": path})
        store.end_run(done, "budget")
        store.begin_run(KEY, DEVICE, {})

    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT arguments, outcome, ended_at IS NULL FROM runs")
        assert rows.fetchall() == [
            (f'{{"database": "{path}", "heads": 128}}', "budget", 0),
            ("{}", None, 1),
        ]


def test_an_outcome_nobody_knows_is_refused(path: Path) -> None:
    with Store.open(path) as store:
        run = store.begin_run(KEY, DEVICE, {})
        with pytest.raises(StoreError, match="does not take such a row"):
            store.end_run(run, "fine")


@pytest.mark.parametrize("latency_us", [None, 0.0, -1.0, float("nan")])
def test_a_success_without_a_latency_is_refused_with_all_that_came_along(
    latency_us: float | None, path: Path
) -> None:
    bad = replace(ok("extend:0+256"), latency_us=latency_us)
    with Store.open(path) as store:
        run = store.begin_run(KEY, DEVICE, {})
        with pytest.raises(StoreError, match="does not take such a row"):
            store.add(run, [ok("extend:0+128"), bad])

        assert store.current(KEY) == []
        store.add(run, [ok("extend:0+128")])
        assert len(store.current(KEY)) == 1


def test_a_reason_with_a_lone_surrogate_is_stored(path: Path) -> None:
    stored(path, table(failed("extend:0+128", "mla", "cannot open \udcff.so")))

    assert read_database(path)[0].measurements[0].reason == "cannot open \\udcff.so"


def test_nothing_to_add_is_no_error(path: Path) -> None:
    stored(path, table())

    assert read_database(path) == []


def test_a_reader_sees_what_is_stored_while_another_process_writes(path: Path) -> None:
    stored(path, table(ok("extend:0+128")))
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE measurements SET latency_us = 1")

        (found,) = read_database(path)

        assert [row.latency_us for row in found.measurements] == [100.0]


def test_adding_does_not_wait_for_a_reader(path: Path) -> None:
    stored(path, table(ok("extend:0+128")))
    with closing(sqlite3.connect(path)) as reader, Store.open(path) as store:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM newest").fetchone() == (1,)

        store.add(store.begin_run(KEY, DEVICE, {}), [ok("extend:0+256")])

        assert len(store.current(KEY)) == 2
        assert reader.execute("SELECT count(*) FROM newest").fetchone() == (1,)


def test_many_may_make_and_fill_one_database_at_once(path: Path) -> None:
    def fill(number: int) -> None:
        with Store.open(path) as store:
            run = store.begin_run(KEY, DEVICE, {"number": number})
            for i in range(5):
                store.add(run, [ok(f"extend:{number}+{i + 1}")])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, range(8)))

    (table,) = read_database(path)
    assert len(table.measurements) == 40
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM keys").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (8,)


def test_wrong_results_are_kept_with_their_numbers(path: Path) -> None:
    wrong = replace(ok("extend:0+128"), status=Status.WRONG, error=float("inf"), reason="off")

    stored(path, table(wrong))

    assert read_database(path)[0].measurements == (wrong,)


def _batches(store: Store) -> list[str]:
    return [row.batch for row in store.current(KEY)]


def test_a_fresh_run_that_was_interrupted_is_gone_on_with(path: Path) -> None:
    with Store.open(path) as store:
        assert store.current(KEY) == []
        store.add(store.begin_run(KEY, DEVICE, {}), [ok("extend:0+1"), ok("extend:0+2")])
        assert _batches(store) == ["extend:0+1", "extend:0+2"]

        fresh = store.begin_run(KEY, DEVICE, {"fresh": True, "points": []})
        assert _batches(store) == []
        store.add(fresh, [ok("extend:0+2")])
        store.add(store.begin_run(KEY, DEVICE, {"fresh": False}), [ok("extend:0+3")])

        assert _batches(store) == ["extend:0+2", "extend:0+3"]
        assert len(store.table(KEY).measurements) == 3, "the older row still counts in the table"


def test_a_fresh_run_of_one_point_leaves_the_others_alone(path: Path) -> None:
    other = replace(ok("decode:n1:1"), point="decode")
    with Store.open(path) as store:
        store.add(store.begin_run(KEY, DEVICE, {}), [ok("extend:0+1"), other])
        store.begin_run(KEY, DEVICE, {"fresh": True, "points": ["prefill"]})

        assert _batches(store) == ["decode:n1:1"]


def test_a_fresh_run_of_another_key_leaves_this_one_alone(path: Path) -> None:
    with Store.open(path) as store:
        store.add(store.begin_run(KEY, DEVICE, {}), [ok("extend:0+1")])
        store.begin_run(replace(KEY, heads=64), DEVICE, {"fresh": True, "points": []})

        assert _batches(store) == ["extend:0+1"]


def test_the_newest_limit_of_a_name_counts_under_its_key_alone(path: Path) -> None:
    other = replace(KEY, heads=16)
    with Store.open(path) as store:
        run = store.begin_run(KEY, DEVICE, {"probe": "rows"})
        store.add_limits(run, {"rows": (100, "exit code 1"), "next_n": (2, "refused")})
        store.add_limits(store.begin_run(KEY, DEVICE, {}), {"rows": (90, "SIGSEGV")})
        store.add_limits(store.begin_run(other, DEVICE, {}), {"rows": (5, "hung")})
        store.add(run, [ok("extend:0+128")])

        assert store.limits(KEY) == {"rows": 90, "next_n": 2}
        assert store.limits(replace(KEY, heads=8)) == {}
    (table,) = read_database(path)
    assert table.limits == {"rows": 90, "next_n": 2}


def test_a_limit_below_zero_is_refused(path: Path) -> None:
    with Store.open(path) as store, pytest.raises(StoreError):
        store.add_limits(store.begin_run(KEY, DEVICE, {}), {"rows": (-1, "")})


def test_a_key_with_limits_and_no_measurement_is_no_table(path: Path) -> None:
    with Store.open(path) as store:
        store.add_limits(store.begin_run(KEY, DEVICE, {}), {"rows": (1, "")})

    assert read_database(path) == []
