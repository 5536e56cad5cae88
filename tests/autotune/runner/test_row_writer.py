"""The row writer: rows go to the database, or to a file that the error names."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_tune import StoreError
from nsa_tune._errors import StoreReadOnly
from nsa_tune.autotune.runner.row_writer import RowWriter, flush_all
from nsa_tune.db import store as store_module
from nsa_tune.db.exchange import import_text
from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store, UnitOfRun
from nsa_tune.db.text_table import read_text
from tests.records import DEVICE, KEY, failed, ok

ROWS = [ok("extend:0+128"), failed("extend:0+128", "mla", "no kernel")]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(store_module, "_BUSY_TIMEOUT_S", 0.05)
    with Store.open(tmp_path / "data" / "t.db") as store:
        yield store


@pytest.fixture
def writer(store: Store) -> RowWriter:
    return RowWriter(store, store.begin_run(KEY, DEVICE, {}), KEY, DEVICE)


def named_file(error: StoreError) -> Path:
    (name,) = re.findall(r"nsa-tune db import (\S+)`", str(error))
    return Path(name)


def test_flushed_rows_are_in_the_database(store: Store, writer: RowWriter) -> None:
    writer.add(ROWS)
    assert writer.stored == []
    writer.flush()
    writer.flush()

    assert writer.stored == ROWS
    (table,) = read_database(store.path)
    assert list(table.measurements) == ROWS


@pytest.mark.parametrize("committed", [False, True])
def test_rows_are_stored_once_though_an_interrupt_ends_a_flush(
    store: Store, writer: RowWriter, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    def interrupted(*given: Any, **named: Any) -> None:
        if committed:
            Store.add(store, *given, **named)
        raise KeyboardInterrupt

    writer.add(ROWS)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer, "_store", SimpleNamespace(add=interrupted))
        writer.flush()
    more = [ok("extend:0+256")]
    writer.add(more)
    writer.flush()

    assert writer.stored == ROWS + more
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("SELECT count(*) FROM measurements").fetchone() == (3,)


def test_a_locked_database_sends_the_rows_to_a_file_that_can_be_imported(
    store: Store, writer: RowWriter
) -> None:
    writer.add(ROWS)
    with closing(sqlite3.connect(store.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked by another process") as raised:
            writer.flush()

    path = named_file(raised.value)
    assert path.parent == store.path.parent
    assert "what was measured last (2 measurements) is in" in str(raised.value)
    assert list(read_text(path).measurements) == ROWS
    assert import_text(store, path) == 2
    assert store.table(KEY).measurements == tuple(ROWS)
    writer.flush()
    assert len(store.table(KEY).measurements) == 2, "nothing is stored twice"


def test_a_database_that_failed_once_is_not_written_again(store: Store, writer: RowWriter) -> None:
    """A run flushes once more when it ends. Another error there would hide the first one, which
    names the file."""
    writer.add(ROWS)
    writer.note(UnitOfRun("GPU-1", "", 1, None))
    store._connection.execute("PRAGMA query_only = ON")

    with pytest.raises(StoreReadOnly, match=r"what was measured last \(2 measurements\) is in"):
        writer.flush()
    writer.flush()


def test_a_full_disk_sends_the_rows_to_a_file_too(store: Store, writer: RowWriter) -> None:
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    rows = [ok(f"extend:{i}+128") for i in range(500)]
    writer.add(rows)

    with pytest.raises(StoreError, match="the disk is full") as raised:
        writer.flush()

    assert len(read_text(named_file(raised.value)).measurements) == 500


def test_the_file_goes_to_the_temporary_directory_when_the_database_s_is_read_only(
    store: Store, writer: RowWriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    write_text = store_refusing(store.path.parent)
    monkeypatch.setattr("nsa_tune.autotune.runner.row_writer.write_text", write_text)
    store._connection.execute("PRAGMA query_only = ON")
    writer.add(ROWS)

    with pytest.raises(StoreReadOnly, match="cannot be written") as raised:
        writer.flush()

    assert named_file(raised.value).parent == tmp_path / "tmp"
    assert list(read_text(named_file(raised.value)).measurements) == ROWS


def store_refusing(directory: Path) -> object:
    """`write_text` on a file system that is read-only under `directory`."""
    from nsa_tune.db.exchange import write_text

    def refuse(table: object, path: Path) -> None:
        if path.parent == directory:
            raise StoreReadOnly(f"{path} cannot be written: Read-only file system")
        write_text(table, path)  # type: ignore[arg-type]

    return refuse


def test_rows_that_no_file_takes_are_reported_as_lost(
    writer: RowWriter, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    def refuse(table: object, path: Path) -> None:
        raise StoreReadOnly("no")

    monkeypatch.setattr("nsa_tune.autotune.runner.row_writer.write_text", refuse)
    store._connection.execute("PRAGMA query_only = ON")
    writer.add(ROWS)

    with pytest.raises(StoreReadOnly, match=r"what was measured last \(2 measurements\) is lost"):
        writer.flush()


def test_the_other_writers_flush_when_one_fails(store: Store, tmp_path: Path) -> None:
    broken = RowWriter(store, 99, KEY, DEVICE)
    sound = RowWriter(store, store.begin_run(KEY, DEVICE, {}), KEY, DEVICE)
    broken.add(ROWS[:1])
    sound.add(ROWS[1:])

    with pytest.raises(StoreError, match=r"what was measured last \(1 measurement\) is in"):
        flush_all([broken, sound])

    assert store.table(KEY).measurements == (ROWS[1],)


def test_an_outcome_that_cannot_be_stored_is_only_a_warning(
    store: Store, writer: RowWriter
) -> None:
    store._connection.execute("PRAGMA query_only = ON")

    writer.end("done")

    with closing(sqlite3.connect(store.path)) as connection:
        assert connection.execute("SELECT outcome FROM runs").fetchall() == [(None,)]
