"""What the views say of a database, against rows whose answers are known."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.db.store import Store
from tests.records import DEVICE, KEY, failed, ok


def rows_of(tmp_path: Path, rows: Sequence[Measurement], sql: str) -> list[Any]:
    """What `sql` answers over a database of `rows`."""
    path = tmp_path / "some.db"
    with Store.open(path) as store:
        store.add(store.begin_run(KEY, DEVICE, {}), rows)
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def sharp(batch: str, arm: str, latency_us: float) -> Measurement:
    """A measurement with an interval of 1 % either way."""
    low_us, high_us = 0.99 * latency_us, 1.01 * latency_us
    return replace(ok(batch, arm, latency_us), low_us=low_us, high_us=high_us)


def test_regret_is_over_the_best_arm_of_the_batch(tmp_path: Path) -> None:
    rows = [ok("extend:0+128", "slow", 150.0), ok("extend:0+128", "fast", 100.0)]

    found = rows_of(tmp_path, rows, "SELECT arm, best_arm, regret FROM v_regret ORDER BY regret")

    assert found == [("fast", "fast", 0.0), ("slow", "fast", 0.5)]


def test_a_winner_is_apart_from_its_runner_up_when_their_intervals_are(tmp_path: Path) -> None:
    rows = [
        sharp("extend:0+1", "a", 100.0), sharp("extend:0+1", "b", 110.0),
        sharp("extend:0+2", "a", 100.0), sharp("extend:0+2", "b", 101.0),
        sharp("extend:0+3", "a", 100.0),
    ]  # fmt: skip

    found = rows_of(
        tmp_path, rows, "SELECT batch, arm, runner_up, apart FROM v_winner ORDER BY batch"
    )

    assert found == [
        ("extend:0+1", "a", "b", 1),
        ("extend:0+2", "a", "b", 0),
        ("extend:0+3", "a", None, None),
    ]


def test_views_go_by_a_layer_with_its_share_of_the_pass(tmp_path: Path) -> None:
    """A pass of 61 layers: 100 us in each and 610 once are 110 us a layer."""
    scheduled = replace(sharp("extend:0+8", "scheduled", 100.0), pass_us=610.0)
    rows = [
        scheduled, sharp("extend:0+8", "plain", 105.0),
        replace(scheduled, batch="extend:0+64"), sharp("extend:0+64", "plain", 115.0),
    ]  # fmt: skip

    winners = rows_of(tmp_path, rows, "SELECT batch, arm, latency_us, apart FROM v_winner")
    with closing(sqlite3.connect(tmp_path / "some.db")) as connection:
        (shown,) = connection.execute(
            "SELECT latency_us, low_us, high_us, pass_us, layers, round(regret, 4) FROM v_regret "
            "WHERE arm = 'scheduled' AND batch = 'extend:0+8'"
        ).fetchall()
        crossover = connection.execute("SELECT left_arm, right_arm FROM v_crossover").fetchall()

    assert sorted(winners) == [
        ("extend:0+64", "scheduled", 110.0, 1), ("extend:0+8", "plain", 105.0, 1),
    ]  # fmt: skip
    assert shown == (110.0, 109.0, 111.0, 610.0, 61, round(110 / 105 - 1, 4))
    assert crossover == [("plain", "scheduled")]


def test_a_model_without_a_profile_charges_the_whole_pass_to_a_layer(tmp_path: Path) -> None:
    path = tmp_path / "some.db"
    with Store.open(path) as store:
        run = store.begin_run(replace(KEY, model="mine"), DEVICE, {})
        store.add(run, [replace(ok("extend:0+8", "a"), pass_us=20.0)])

    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT latency_us, layers FROM v_regret").fetchall()
    assert rows == [(120.0, None)]


def test_an_arm_that_failed_is_never_a_winner(tmp_path: Path) -> None:
    rows = [failed("extend:0+1", "a", "out of memory"), ok("extend:0+1", "b", 100.0)]

    assert rows_of(tmp_path, rows, "SELECT arm FROM v_winner") == [("b",)]


def test_limits_count_failed_wrong_and_absent_arms(tmp_path: Path) -> None:
    wrong = replace(ok("extend:0+2", "a"), status=Status.WRONG, reason="relative error 1")
    rows = [
        failed("extend:0+1", "a", "out of memory"), ok("extend:0+1", "b"),
        wrong, ok("extend:0+2", "b"),
        ok("extend:0+4", "b"), ok("extend:0+8", "b"), ok("extend:0+8", "a"),
    ]  # fmt: skip

    found = rows_of(
        tmp_path, rows, "SELECT arm, kind, reason, batches, example FROM v_limits ORDER BY kind"
    )

    assert found == [
        ("a", "absent", "", 1, "extend:0+4"),
        ("a", "failed", "out of memory", 1, "extend:0+1"),
        ("a", "wrong", "relative error 1", 1, "extend:0+2"),
    ]


def test_a_crossover_lies_between_neighbours_of_one_line(tmp_path: Path) -> None:
    winners = {"extend:64+8": "a", "extend:64+16": "a", "extend:64+128": "b", "extend:0+64": "b"}
    rows = [ok(batch, arm, 50.0) for batch, arm in winners.items()]
    rows += [ok(batch, "c", 90.0) for batch in winners]

    found = rows_of(
        tmp_path, rows,
        "SELECT mode, line, axis, left_arm, right_arm, left_value, right_value FROM v_crossover",
    )  # fmt: skip

    # By number and not by text, in which 128 would come before 16.
    assert found == [("extend", "sequences 1, prefix 64", "new tokens", "a", "b", 16, 128)]


def test_a_line_of_another_mode_runs_along_its_sequences(tmp_path: Path) -> None:
    rows = [
        ok("target_verify:n2:4096", "a"), ok("target_verify:n2:4096x64", "b"),
        ok("target_verify:n2:4096x8,512", "c"), ok("target_verify:n4:4096x128", "c"),
    ]  # fmt: skip

    found = rows_of(
        tmp_path, rows, "SELECT line, axis, left_arm, right_arm, left_value, right_value "
        "FROM v_crossover"
    )  # fmt: skip

    assert found == [("next_n 2, context 4096", "sequences", "a", "b", 1, 64)]


def test_a_newer_measurement_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "some.db"
    with Store.open(path) as store:
        for a in (50.0, 200.0):
            run = store.begin_run(KEY, DEVICE, {})
            store.add(run, [ok("extend:0+1", "a", a), ok("extend:0+1", "b", 100.0)])

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT arm FROM v_winner").fetchall() == [("b",)]
