"""Merging databases and text tables of many hosts."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune._errors import StoreCorrupt, StoreError
from nsa_tune.backend.types.records import Measurement
from nsa_tune.db.checks import Check, read_checks
from nsa_tune.db.exchange import import_text, merge, write_text
from nsa_tune.db.history import Limit, PastRun, order_of, read_histories
from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import content_of, format_table
from tests.records import DEVICE, KEY, failed, ok, stored, table

TIMES = [f"2026-11-{day}T12:00:00.000000+00:00" for day in (20, 21, 22)]
KEYS = (KEY, replace(KEY, heads=16))
DEVICES = (DEVICE, replace(DEVICE, memory=DEVICE.memory - 1))
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Each example makes some ten databases, and a disk has to keep each commit."""
CHECK = Check("ab", "580", (("torch", "2"),), TIMES[0], True, 0.01, ())


class Source(NamedTuple):
    """A file to merge: every run with its key."""

    runs: tuple[tuple[int, PastRun], ...]
    is_text: bool

    def written(self, folder: Path, name: str) -> list[Path]:
        """The files; a text table for each key."""
        path = folder / f"{name}.db"
        with Store.open(path) as store:
            for key, past in self.runs:
                run = store.begin_run(KEYS[key], past.device, {})
                for at, row in past.rows:
                    with patch("nsa_tune.db.store._now", lambda at=at: at):
                        store.add(run, [row])
                for limit in past.limits:
                    store.add_limits(run, {limit.name: (limit.value, limit.past)})
                store.end_run(run, "done")
        with closing(sqlite3.connect(path)) as connection:
            for number, (_, past) in enumerate(self.runs, 1):
                connection.execute(
                    "UPDATE runs SET started_at = ? WHERE id = ?", [past.started_at, number]
                )
            for number, (_, past) in enumerate(self.runs, 1):
                for limit in past.limits:
                    connection.execute(
                        "UPDATE limits SET found_at = ? WHERE run_id = ?", [limit.found_at, number]
                    )
            connection.commit()
        return _as_text(path) if self.is_text else [path]


def _as_text(path: Path) -> list[Path]:
    found = []
    for one in read_database(path):
        text = path.with_name(f"{path.stem}-{one.key.heads}.tsv")
        write_text(one, text)
        found.append(text)
    return found


_rows = st.builds(
    lambda arm, batch, us, digits: replace(ok(f"extend:0+{batch}", arm, us + digits)),
    st.sampled_from(["mha/fa3", "mla/flashmla_kv"]),
    st.integers(1, 3),
    st.integers(100, 102),
    st.sampled_from([0.0, 0.000123]),  # the same in a text table
) | st.builds(lambda batch: failed(f"extend:0+{batch}", "mha/fa3", "no"), st.integers(1, 3))
_runs = st.builds(
    PastRun,
    st.sampled_from(DEVICES),
    st.just("{}"),
    st.sampled_from(TIMES),
    st.none(),
    st.none(),
    st.lists(st.tuples(st.sampled_from(TIMES), _rows), max_size=5).map(tuple),
    st.lists(
        st.builds(
            Limit, st.just("deep_gemm_next_n"), st.integers(1, 3), st.just(""),
            st.sampled_from(TIMES),
        ),
        max_size=1,
    ).map(tuple),
)  # fmt: skip
_sources = st.builds(
    Source,
    st.lists(st.tuples(st.integers(0, 1), _runs), min_size=1, max_size=3).map(tuple),
    st.booleans(),
)


def _contents(path: Path) -> dict[str, str]:
    """The content hash of each table, by its key."""
    return {one.key.digest: content_of(one) for one in read_database(path)}


def _merged(into: Path, files: Sequence[Path]) -> dict[str, str]:
    with Store.open(into) as store:
        for file in files:
            merge(store, file)
    return _contents(into)


@settings(max_examples=40)
@given(st.lists(_sources, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_any_order_and_any_repetition_give_the_same_content(
    sources: list[Source], random: object
) -> None:
    from random import Random

    assert isinstance(random, Random)
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        files = [
            file for i, one in enumerate(sources) for file in one.written(folder, f"source{i}")
        ]
        once = _merged(folder / "once.db", files)
        others = [*files, *random.choices(files, k=len(files))] if files else []
        random.shuffle(others)

        assert _merged(folder / "other.db", others) == once
        # In groups: what two services have merged is merged by a third.
        half = len(files) // 2
        _merged(folder / "left.db", files[:half])
        _merged(folder / "right.db", files[half:])
        assert _merged(folder / "all.db", [folder / "right.db", folder / "left.db"]) == once
        assert _merged(folder / "once.db", [folder / "all.db"]) == once


@given(_rows, _rows)
def test_of_two_measurements_of_one_time_one_counts(one: Measurement, other: Measurement) -> None:
    assert (one == other) == (order_of(one) == order_of(other))


def _database(path: Path, *rows: Measurement, at: str = TIMES[0]) -> Path:
    with patch("nsa_tune.db.store._now", lambda: at):
        return stored(path, table(*rows))


def test_a_merge_counts_what_is_new(tmp_path: Path) -> None:
    first = _database(tmp_path / "a.db", ok("extend:0+1"), ok("extend:0+2"))
    second = _database(
        tmp_path / "b.db", ok("extend:0+2", latency_us=90.0), ok("extend:0+3"), at=TIMES[1]
    )
    with Store.open(tmp_path / "all.db") as store:
        assert merge(store, first)[1:] == (2, 0)
        assert merge(store, second)[1:] == (2, 0)
        assert merge(store, first)[1:] == (0, 2)
        assert {row.batch: row.latency_us for row in store.table(KEY).measurements} == {
            "extend:0+1": 100.0, "extend:0+2": 90.0, "extend:0+3": 100.0,
        }  # fmt: skip


def test_older_rows_and_runs_are_kept_as_they_were(tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", ok("extend:0+1", latency_us=123.456789))
    _database(path, ok("extend:0+1", latency_us=90.0), at=TIMES[1])
    with Store.open(tmp_path / "all.db") as store:
        for _ in range(2):
            merge(store, path)

    assert read_histories(tmp_path / "all.db") == read_histories(path)


def test_rows_of_a_text_that_has_grown_keep_their_times(tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", ok("extend:0+1"))
    _database(path, ok("extend:0+2"), at=TIMES[2])
    between = _database(tmp_path / "b.db", ok("extend:0+1", latency_us=90.0), at=TIMES[1])
    for i, files in enumerate(([*_as_text(path), between], [between, *_as_text(path)])):
        into = tmp_path / f"{i}.merged"
        _merged(into, files)

        (found,) = read_database(into)
        assert {row.batch: row.latency_us for row in found.measurements} == {
            "extend:0+1": 90.0, "extend:0+2": 100.0,
        }  # fmt: skip


def test_what_is_imported_keeps_its_times(tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", ok("extend:0+1"))
    _database(path, ok("extend:0+2"), at=TIMES[2])
    (text,) = _as_text(path)
    with Store.open(tmp_path / "b.db") as store:
        assert import_text(store, text) == 2
        assert import_text(store, text) == 0
        table = store.table(KEY)
    assert {row.batch: table.time_of(row) for row in table.measurements} == {
        "extend:0+1": TIMES[0], "extend:0+2": TIMES[2],
    }  # fmt: skip


def test_ones_own_text_hides_no_digits(tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", ok("extend:0+1", latency_us=123.456789))
    for files in ([path, *_as_text(path)], [*_as_text(path), path]):
        into = tmp_path / f"{files[0].name}.merged"
        _merged(into, files)

        assert read_database(into)[0].measurements[0].latency_us == 123.456789


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE runs SET started_at = x'00'",
        "UPDATE measurements SET latency_us = 1e300",
        "UPDATE measurements SET measured_at = 3.5",
        "UPDATE measurements SET measured_at = x'00'",
        "UPDATE keys SET libraries = '[]'",
        "UPDATE devices SET memory = -1",
        "CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM runs; END",
    ],
)
def test_a_strangers_database_is_checked(statement: str, tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", ok("extend:0+1"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()
    with Store.open(tmp_path / "all.db") as store:
        if "3.5" in statement:  # SQLite keeps it as a text
            merge(store, path)
            return
        with pytest.raises(StoreCorrupt):
            merge(store, path)

        assert read_database(store.path) == []


def test_what_would_make_a_table_unreadable_is_not_merged(tmp_path: Path) -> None:
    path, other = tmp_path / "a.tsv", tmp_path / "b.tsv"
    for file, news in ((path, (1, 2, 3)), (other, (4, 5))):
        write_text(table(*(ok(f"extend:0+{new}x999999") for new in news)), file)
    with Store.open(tmp_path / "all.db") as store:
        merge(store, path)
        before = read_database(store.path)
        with pytest.raises(StoreCorrupt, match="sequences together"):
            merge(store, other)

        assert read_database(store.path) == before


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"points": [["a"]], "b": {}}', "[" * 9999])
def test_strange_arguments_of_a_run_are_left_out(text: str, tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", ok("extend:0+1"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE runs SET arguments = ?", [text])
        connection.commit()
    with Store.open(tmp_path / "all.db") as store:
        assert merge(store, path).added == 1
        assert len(store.current(KEY)) == 1


def test_checks_are_taken_over_once(tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", ok("extend:0+1"))
    with Store.open(path) as store:
        store.add_check(CHECK)
    with Store.open(tmp_path / "all.db") as store:
        for _ in range(2):
            merge(store, path)

    assert read_checks(tmp_path / "all.db") == [CHECK]


def test_a_database_is_not_merged_into_itself(tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", ok("extend:0+1"))
    with Store.open(path) as store, pytest.raises(StoreError, match="give other files"):
        merge(store, path)


def test_the_content_is_what_a_text_says(tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", ok("extend:0+1"))
    (found,) = read_database(path)

    assert f"# content = {content_of(found)}\n" in format_table(found)
