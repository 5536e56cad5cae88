"""Uploaded tables: added once, and refused when they would make the database useless."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given

from nsa_tune._errors import StoreError, UsageError
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db import reader
from nsa_tune.db.reader import read_database
from nsa_tune.db.runs import runs_of
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import format_table
from nsa_tune.fleet.service.tables import uploads
from nsa_tune.fleet.service.tables.uploads import checked, merge
from tests.fleet.service.made_up_tables import H200_KEY, grown, text_of
from tests.records import ok, tables

NOW = datetime(2026, 11, 20, 13, tzinfo=UTC)


@contextmanager
def received(body: bytes, sender: str) -> Iterator[Path]:
    """`body` as the file that a request leaves."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{sender}.tsv")
        path.write_bytes(body)
        yield path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "t.db") as opened:
        yield opened


def upload(store: Store, one: Table) -> tuple[int, int]:
    """How many rows of `one` were new, and how many known."""
    with received(text_of(one), "gpu-7") as path:
        _, added, known = merge(store, path, checked(path, NOW))
    return added, known


def test_rows_are_added_once(store: Store) -> None:
    assert upload(store, grown(3)) == (6, 0)
    assert upload(store, grown(5, minute=1)) == (4, 6)
    assert upload(store, grown(5, minute=1)) == (0, 10)
    (table,) = read_database(store.path)
    assert len(table.measurements) == 10


def test_the_database_says_who_sent_what(store: Store) -> None:
    upload(store, grown(2))
    assert [run.arguments for run in runs_of(store.path)] == [{"import": "gpu-7.tsv"}]


_TIME = "measured_at is"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (replace(grown(1), measured_at="2026-11-20T14:00:00.000001+00:00"), "which is to come"),
        (replace(grown(1), measured_at="9999"), _TIME),
        (replace(grown(1), measured_at="2026-11-20T12:00:00"), _TIME),
        (replace(grown(1), measured_at="2026-11-20T12:00:00+01:00"), _TIME),
        (replace(grown(1), measured_at=""), _TIME),
        (grown(1, replace(H200_KEY, model="gpt")), "unknown model"),
        (grown(1, replace(H200_KEY, heads=7)), "do not divide"),
        (grown(1, replace(H200_KEY, driver="a\tb")), "cannot be printed"),
        (grown(1, replace(H200_KEY, libraries=(("x", "y" * 500),))), "long"),
        (grown(1, replace(H200_KEY, protocol="")), "no timing protocol"),
        (replace(grown(1), measurements=(ok("nonsense"),)), "is no batch"),
        (replace(grown(1), measurements=(ok("extend:0+1", latency_us=1e-9),)), "cannot be"),
    ],
)
def test_a_table_that_would_spoil_the_database_is_refused(bad: Table, words: str) -> None:
    with received(text_of(bad), "gpu-7") as path, pytest.raises(UsageError, match=words) as error:
        checked(path, NOW)
    assert str(path.parent) not in str(error.value)


@pytest.mark.parametrize("body", [b"", b"nonsense", b"\xff\xfe", b"# format = nsa-tune-table 1\n"])
def test_what_is_no_table_is_refused(body: bytes) -> None:
    with received(body, "gpu-7") as path, pytest.raises(UsageError):
        checked(path, NOW)


def test_a_table_that_was_changed_is_refused() -> None:
    text = text_of(grown(2)).replace(b"\t100", b"\t101")
    with received(text, "x") as path, pytest.raises(UsageError, match="the table was changed"):
        checked(path, NOW)


@given(tables())
def test_any_table_is_taken_or_refused_in_a_sentence(one: Table) -> None:
    with received(format_table(one).encode(), "x") as path:
        try:
            found = checked(path, NOW)
        except UsageError as error:
            assert str(error)
        else:
            assert found.key == Key(*[getattr(one.key, name) for name in Key.__slots__])


@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [
        ("MOST_KEYS", 1, "holds 1 tables, and takes no more"),
        ("MOST_STORED", 6, "start a new database"),
        ("MOST_ROWS", 6, "more than 6 rows with those known here"),
    ],
)
def test_a_database_grows_no_larger_than_readers_take(
    limit: str, most: int, words: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(store, grown(2))
    monkeypatch.setattr(uploads, limit, most)
    more = grown(2, replace(H200_KEY, heads=16)) if limit == "MOST_KEYS" else grown(4, minute=1)
    with pytest.raises((StoreError, UsageError), match=words):
        upload(store, more)
    assert len(reader.read_database(store.path)) == 1
