"""Stores that cannot be used, and machines that end at a bad moment."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from nsa_tune._errors import StoreCorrupt, StoreError, StoreMissing, StoreNewer, StoreReadOnly
from nsa_tune.db import store as store_module
from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store
from tests.records import DEVICE, KEY, ok, stored, table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with 300 measurements."""
    rows = (ok(f"extend:{i}+128") for i in range(300))
    return stored(tmp_path / "nsa-tune.db", table(*rows))


def _open(path: Path) -> object:
    with Store.open(path) as store:
        return store.table(KEY)


BOTH = pytest.mark.parametrize("use", [_open, read_database], ids=["store", "reader"])
Use = Callable[[Path], object]


_CHILD = """
import sys
from itertools import count
from pathlib import Path
from nsa_tune.db.store import Store
from tests.records import DEVICE, KEY, ok

with Store.open(Path(sys.argv[1])) as store:
    run = store.begin_run(KEY, DEVICE, {})
    for i in count():
        store.add(run, [ok(f"extend:{i}+128", arm) for arm in ("a", "b", "c")])
        print(i, flush=True)
"""


@pytest.mark.parametrize("lines", [1, 40, 200])
def test_what_was_reported_as_stored_survives_a_kill(lines: int, tmp_path: Path) -> None:
    path = tmp_path / "nsa-tune.db"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _CHILD, str(path)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        reported = [child.stdout.readline() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        reported += child.stdout.readlines()
    assert child.returncode == -signal.SIGKILL

    (table,) = read_database(path)

    batches = [row.batch for row in table.measurements]
    assert {f"extend:{int(line)}+128" for line in reported} <= set(batches)
    assert len(batches) == 3 * len(set(batches)), "a batch was stored in part"
    with Store.open(path) as store:
        assert len(store.current(KEY)) == len(batches)
        store.add(store.begin_run(KEY, DEVICE, {}), [ok("extend:7+7")])
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@BOTH
@pytest.mark.parametrize("kept", [50, 1000, 4096, 0.3, 0.6, 0.99])
def test_a_truncated_file_is_refused_and_left_as_it_is(kept: float, use: Use, path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if kept < 1 else int(kept)])
    rest = path.read_bytes()

    with pytest.raises(StoreCorrupt, match=r"nsa-tune\.db is"):
        use(path)

    assert path.read_bytes() == rest


def test_a_store_refuses_a_file_with_an_overwritten_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-4096:] = b"\x55" * 4096
    path.write_bytes(data)

    with pytest.raises(StoreCorrupt, match="damaged"):
        Store.open(path)

    assert path.read_bytes() == data


@BOTH
def test_a_file_that_is_not_sqlite_is_refused_and_left_as_it_is(use: Use, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("latency,arm\n" * 100)

    with pytest.raises(StoreCorrupt, match="not an SQLite database"):
        use(path)

    assert path.read_text() == "latency,arm\n" * 100


@BOTH
def test_the_database_of_another_program_is_refused_and_left_as_it_is(
    use: Use, tmp_path: Path
) -> None:
    path = tmp_path / "places.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    before = path.read_bytes()

    with pytest.raises(StoreCorrupt, match="not one of nsa-tune"):
        use(path)

    assert path.read_bytes() == before


@BOTH
def test_a_newer_schema_says_upgrade(use: Use, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO nsa_tune_migrations VALUES (99, 'later', '2030')")
        connection.commit()

    with pytest.raises(StoreNewer, match=r"schema 99, .*upgrade"):
        use(path)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE keys SET libraries = 'torch'",
        "UPDATE keys SET libraries = '[1]'",
        "UPDATE keys SET heads = 'many'",
        "UPDATE keys SET gpu = x'ff'",
        "UPDATE keys SET gpu = cast(x'ff' AS TEXT)",
        "UPDATE devices SET sms = -1",
        "UPDATE devices SET name = 7.5, arch = x'00'",
        "UPDATE measurements SET latency_us = 'fast'",
        "UPDATE measurements SET reason = x'00'",
        "UPDATE measurements SET samples = 'all'",
        "DELETE FROM nsa_tune_migrations",
        "DELETE FROM runs; DELETE FROM devices",
        "DROP TABLE measurements",
        "DROP TABLE keys",
    ],
)
def test_whatever_is_wrong_inside_a_database_is_a_store_error(change: str, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"PRAGMA ignore_check_constraints = ON; {change};")

    with pytest.raises(StoreCorrupt, match=r"nsa-tune\.db"):
        read_database(path)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE measurements SET samples = 'all'",
        "UPDATE measurements SET measured_at = x'00'",
        "UPDATE limits SET value = 'many'",
        "UPDATE runs SET arguments = '{'",
        'UPDATE runs SET arguments = \'{"fresh": true, "points": 3}\'',
        "UPDATE runs SET arguments = '" + 10_000 * "[" + "'",
    ],
)
def test_a_run_is_told_what_is_wrong_in_its_database(change: str, path: Path) -> None:
    with Store.open(path) as store:
        store.add_limits(store.begin_run(KEY, DEVICE, {}), {"rows": (7, "it ended")})
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"PRAGMA ignore_check_constraints = ON; {change};")

    with (
        Store.open(path) as store,
        pytest.raises(StoreCorrupt, match=r"nsa-tune\.db is damaged"),
    ):
        store.limits(KEY)
        store.current(KEY)
        store.table(KEY)


def test_opening_a_large_database_reads_keys_and_runs_but_not_each_row(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_WHOLLY_CHECKED", 0)
    good = path.read_bytes()
    with closing(sqlite3.connect(path)) as connection:
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))

    def overwrite(name: str) -> None:
        at = (roots[name] - 1) * size
        path.write_bytes(good[:at] + b"\xff" * size + good[at + size :])

    overwrite("measurements")
    with Store.open(path) as opened, pytest.raises(StoreCorrupt, match="is damaged"):
        opened.table(KEY)
    overwrite("runs")
    with pytest.raises(StoreCorrupt, match="is damaged"):
        Store.open(path)


@BOTH
def test_a_directory_in_place_of_a_database(use: Use, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a directory"):
        use(tmp_path)


def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.db"

    with pytest.raises(StoreMissing, match="nsa-tune run"):
        read_database(path)

    assert not path.exists()


def test_an_empty_file_is_an_empty_database(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()

    assert read_database(path) == []
    with Store.open(path) as store:
        assert read_database(store.path) == []


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StoreReadOnly, match="--db or NSA_TUNE_DB"):
        Store.open(tmp_path / "file" / "sub" / "nsa-tune.db")


def test_a_name_with_characters_that_mean_something_in_a_uri(tmp_path: Path) -> None:
    path = stored(tmp_path / "a?mode=memory#100%.db", table(ok("extend:0+1")))

    assert path.is_file()
    assert len(read_database(path)) == 1


@contextmanager
def _nobody() -> Iterator[None]:
    """Without root's right to write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("root cannot become another user here")
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory
        directory.chmod(0o755)


def test_a_file_that_may_not_be_written(open_directory: Path) -> None:
    path = stored(open_directory / "nsa-tune.db", table(ok("extend:0+1")))
    path.chmod(0o444)

    with _nobody():
        with pytest.raises(StoreReadOnly, match="--db"):
            Store.open(path)
        assert len(read_database(path)[0].measurements) == 1


def test_a_directory_that_may_not_be_written(open_directory: Path) -> None:
    path = stored(open_directory / "nsa-tune.db", table(ok("extend:0+1")))
    path.chmod(0o666)
    open_directory.chmod(0o555)

    with _nobody():
        with pytest.raises(StoreReadOnly, match="--db"):
            Store.open(path)
        with pytest.raises(StoreReadOnly, match="--db"):
            Store.open(open_directory / "new.db")
        with pytest.raises(StoreReadOnly, match="--db"):
            Store.open(open_directory / "sub" / "new.db")
        assert len(read_database(path)[0].measurements) == 1


def test_a_file_that_may_not_be_read(open_directory: Path) -> None:
    path = open_directory / "nsa-tune.db"
    Store.open(path).close()
    path.chmod(0o000)

    with _nobody(), pytest.raises(StoreError, match="who may read it"):
        read_database(path)


def test_a_file_system_that_is_read_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(path: Path) -> sqlite3.Connection:
        return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)

    monkeypatch.setattr(store_module, "_connect", connect)

    with pytest.raises(StoreReadOnly, match="make it writable"):
        Store.open(path)


def test_a_locked_database(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_BUSY_TIMEOUT_S", 0.05)
    with closing(sqlite3.connect(path)) as other, Store.open(path) as store:
        run = store.begin_run(KEY, DEVICE, {})
        other.execute("BEGIN IMMEDIATE")

        with pytest.raises(StoreError, match="locked by another process"):
            store.add(run, [ok("extend:7+7")])
        with pytest.raises(StoreError, match="locked by another process"):
            Store.open(path)

        other.rollback()
        store.add(run, [ok("extend:7+7")])


def test_a_full_disk_keeps_what_was_stored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = store_module._connect

    def small(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 8}")
        return connection

    monkeypatch.setattr(store_module, "_connect", small)
    stored = 300
    with Store.open(path) as store:
        run = store.begin_run(KEY, DEVICE, {})
        with pytest.raises(StoreError, match="disk is full"):
            for i in range(1000):
                store.add(run, [ok(f"extend:{i}+{j}") for j in range(5)])
                stored += 5

    assert 300 < stored < 5300
    assert len(read_database(path)[0].measurements) == stored
