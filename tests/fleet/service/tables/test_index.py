"""The index: what tables there are, read whole or only those of one key."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune._errors import StoreCorrupt
from nsa_tune.db.store import Store
from nsa_tune.fleet.service.tables.index import Index
from tests.db.loose import loosen
from tests.records import DEVICE, KEY, failed, ok

NAME = (KEY.gpu, KEY.model, KEY.heads, KEY.kv_layout)
OTHERS = [replace(KEY, driver="600"), replace(KEY, heads=64), replace(KEY, gpu="another")]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "t.db") as store:
        for key in (KEY, *OTHERS):
            store.add(store.begin_run(key, DEVICE, {}), [ok("extend:0+16"), ok("extend:0+32")])
        yield store


def test_the_tables_of_a_key_are_those_among_all_whatever_is_added(store: Store) -> None:
    with closing(Index(store.path)) as by_key, closing(Index(store.path)) as whole:
        for number in range(4):
            assert by_key.of(NAME) == whole.held().of(NAME)
            assert len(by_key.of(NAME)) == 2
            anywhere = (None, *NAME[1:])
            assert by_key.of(anywhere) == whole.held().of(anywhere)
            run = store.begin_run((KEY, *OTHERS)[number], DEVICE, {})
            store.add(run, [ok(f"extend:{number}+64")])
            store.add_limits(run, {"rows": (number, "it ended")})


def test_a_table_in_which_nothing_succeeded_is_none(store: Store) -> None:
    key = replace(KEY, heads=32)
    store.add(store.begin_run(key, DEVICE, {}), [failed("extend:0+16", "mha/fa3", "no")])
    with closing(Index(store.path)) as index:
        assert index.of((key.gpu, key.model, key.heads, key.kv_layout)) == ()


def test_who_asks_for_a_key_waits_for_no_reading_of_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("all tables are read")

    monkeypatch.setattr(Index, "_read", read)
    with closing(Index(store.path)) as index:
        assert [entry.measurements for entry in index.of(NAME)] == [2, 2]


@pytest.mark.parametrize(
    "change",
    ["keys SET libraries = 'x'", "keys SET libraries = '[]'", "keys SET gpu = NULL",
     "keys SET model = x'ff'", "keys SET id = 'x'", "runs SET id = 'x'",
     "measurements SET measured_at = x'ff'", "measurements SET id = 'x' WHERE id = 1"],
)  # fmt: skip
def test_what_is_damaged_is_said_in_a_sentence(change: str, store: Store) -> None:
    store.close()
    loosen(store.path)
    with closing(sqlite3.connect(store.path)) as connection, connection:
        connection.execute(f"UPDATE {change}")
    with closing(Index(store.path)) as index:
        with pytest.raises(StoreCorrupt, match="is damaged"):
            index.held()
        with pytest.raises(StoreCorrupt, match="is damaged"):
            index.of(NAME)
