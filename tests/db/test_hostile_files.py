"""Files that strangers made: pipes, devices, bombs, schemas that compute, folders of others."""

from __future__ import annotations

import logging
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from nsa_tune import Dispatcher
from nsa_tune._errors import NsaTuneError, StoreCorrupt, StoreError
from nsa_tune.db import search
from nsa_tune.db.connection import connect_read_only, store_errors
from nsa_tune.db.exchange import import_text
from nsa_tune.db.places import default_database, sources
from nsa_tune.db.reader import Wanted, read_database
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import format_table, read_key, read_text
from nsa_tune.reports.analysis.selection import TableFilter, select_tables
from tests.records import KEY, ok, stored, table

ROOT = Path(__file__).parents[2]


def _open(path: Path) -> Dispatcher:
    return Dispatcher.open(path, KEY.gpu, model=KEY.model, heads=KEY.heads, kv_dtype="fp8")


def _limited(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process with 2 GiB of memory, for at most 2 minutes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))

    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True,
        timeout=120, check=False, preexec_fn=limit,
    )  # fmt: skip


# --- pipes and devices


@pytest.mark.parametrize("name", ["pipe.db", "pipe.tsv"])
@pytest.mark.parametrize("use", ["open", "find", "select", "import", "read"])
def test_a_pipe_is_refused_at_once(name: str, use: str, tmp_path: Path) -> None:
    pipe = tmp_path / name
    os.mkfifo(pipe)
    uses: dict[str, Callable[[], object]] = {
        "open": lambda: _open(pipe),
        "find": lambda: list(search.find(pipe, Wanted("x", "y", 1, "z"))),
        "select": lambda: select_tables(pipe, TableFilter()),
        "import": lambda: import_text(Store.open(tmp_path / "a.db"), pipe),
        "read": lambda: read_key(pipe),
    }
    if use == "open":
        uses[use]()
        return
    with pytest.raises(StoreError, match="not a regular file"):
        uses[use]()


@pytest.mark.parametrize("name", ["/dev/zero", "zero.tsv"])
def test_an_endless_device_named_by_the_environment_is_passed_over(
    name: str, tmp_path: Path
) -> None:
    if name == "zero.tsv":
        (tmp_path / name).symlink_to("/dev/zero")
        name = str(tmp_path / name)
    code = (
        "import os, sys; os.environ['NSA_TUNE_DB'] = sys.argv[1]\n"
        "from nsa_tune import Dispatcher\n"
        "print(Dispatcher.open(gpu='NVIDIA H200', model='deepseek-v3.2', heads=128, "
        "kv_dtype='fp8').match)"
    )

    done = _limited(code, name)

    assert done.stdout.strip() in ("exact", "stale"), done.stderr
    assert "not a regular file" in done.stderr


def test_a_pipe_named_by_the_environment_does_not_hold_up_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.db", "a.tsv"):
        os.mkfifo(tmp_path / name)
        monkeypatch.setenv("NSA_TUNE_DB", str(tmp_path / name))

        opened = Dispatcher.open(
            gpu="NVIDIA H200", model="deepseek-v3.2", heads=128, kv_dtype="fp8"
        )

        assert opened.source.startswith("shipped:")
        assert "not a regular file" in caplog.text
        caplog.clear()


# --- bombs


@pytest.mark.parametrize("kept_in", ["text", "database"])
def test_few_characters_do_not_become_gigabytes(kept_in: str, tmp_path: Path) -> None:
    rows = [ok(f"extend:{i}+1x262144", arm) for i in range(300) for arm in ("mha/fa3", "mla/fa3")]
    if kept_in == "text":
        path = tmp_path / "bomb.tsv"
        path.write_text(format_table(table(*rows)))
        assert path.stat().st_size < 60_000
    else:
        path = stored(tmp_path / "bomb.db", table(*rows))
    code = (
        "import sys; from pathlib import Path; from tests.db.test_hostile_files import _open\n"
        "print(_open(Path(sys.argv[1])).source)"
    )

    done = _limited(code, str(path))

    assert "more than 4194304 sequences together" in done.stderr
    assert "shipped" in done.stdout


def test_a_legitimate_table_has_room_for_its_sequences(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(format_table(table(*(ok(f"extend:{i}+1x16384") for i in range(200)))))

    assert len(read_text(path).measurements) == 200


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"# format = nsa-tune-table 1\n" + b"x" * 2**24, "more than 16777216 bytes"),
        (b"# format = nsa-tune-table 1\n" * 2**18, "more than 65536 rows"),
    ],
)  # fmt: skip
def test_text_has_bounds(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(content)

    with pytest.raises(StoreCorrupt, match=complaint):
        read_text(path)


def test_a_head_has_bounds(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"#" * (2**20 + 1))

    with pytest.raises(StoreCorrupt, match="line 1 has more than 1048576 bytes"):
        read_key(path)


def test_a_database_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ok(f"extend:{i}+1") for i in range(4)]
    path = stored(tmp_path / "a.db", *[table(*rows)] * 3)
    monkeypatch.setattr("nsa_tune.db.reader.MOST_STORED", 11)

    with pytest.raises(StoreCorrupt, match="more than 11 measurements of one key"):
        read_database(path)
    monkeypatch.setattr("nsa_tune.db.reader.MOST_STORED", 12)
    assert len(read_database(path)[0].measurements) == 4
    monkeypatch.setattr("nsa_tune.db.reader.MOST_ROWS", 3)
    with pytest.raises(StoreCorrupt, match="more than 3 measurements of one key"):
        read_database(path)


# --- schemas that compute


_ENDLESS = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    "SELECT i AS id, 'd' AS digest, 'g' AS gpu, '' AS driver, '{}' AS libraries, 'm' AS model, "
    "1 AS heads, 'l' AS kv_layout, 'p' AS protocol FROM n"
)


def _database(path: Path, *statements: str) -> Path:
    stored(path, table(ok("extend:0+1")))
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path


def test_a_view_in_place_of_a_table_is_refused(tmp_path: Path) -> None:
    view = f"CREATE VIEW keys AS {_ENDLESS}"
    path = _database(tmp_path / "a.db", "PRAGMA foreign_keys = OFF", "DROP TABLE keys", view)

    with pytest.raises(StoreCorrupt, match="has a view keys, which nsa-tune did not make"):
        read_database(path)
    with pytest.raises(StoreCorrupt, match="has a view keys"):
        Store.open(path)


def test_a_trigger_is_refused(tmp_path: Path) -> None:
    trigger = "CREATE TRIGGER t AFTER INSERT ON measurements BEGIN DELETE FROM measurements; END"
    path = _database(tmp_path / "a.db", trigger)

    with pytest.raises(StoreCorrupt, match="has a trigger t"):
        Store.open(path)


def test_what_computes_without_end_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa_tune.db.connection._MOST_CPU_S", 0.1)
    path = _database(tmp_path / "a.db", f"CREATE VIEW endless AS {_ENDLESS}")

    with (
        pytest.raises(StoreCorrupt, match="takes longer to read than any table does"),
        store_errors(path),
        closing(connect_read_only(path)) as connection,
    ):
        connection.execute("SELECT count(*) FROM endless").fetchone()


def test_a_schema_that_is_no_text_is_damage(tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", "CREATE VIEW harmless AS SELECT 1")
    path.write_bytes(path.read_bytes().replace(b"harmless", b"harml\xaass"))

    with pytest.raises(StoreCorrupt, match="is damaged"):
        read_database(path)


def test_a_value_has_a_bound(tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", "CREATE VIEW large AS SELECT zeroblob(100000000) AS x")

    with (
        pytest.raises(StoreError),
        store_errors(path),
        closing(connect_read_only(path)) as connection,
    ):
        connection.execute("SELECT x FROM large").fetchone()


@pytest.mark.parametrize(
    "change",
    [
        'UPDATE keys SET libraries = \'{"\\ud800": "1"}\'',
        f"UPDATE keys SET libraries = '{'[' * 100_000}'",
        "UPDATE measurements SET latency_us = 1e-320",
        "UPDATE measurements SET latency_us = 1e308",
        "UPDATE measurements SET pass_us = 1e308",
        "UPDATE measurements SET error = 9e999 - 9e999, status = 'ok'",
    ],
)
def test_a_value_that_cannot_be_is_a_store_error(change: str, tmp_path: Path) -> None:
    path = _database(tmp_path / "a.db", change)

    try:
        read_database(path)
    except NsaTuneError as error:
        assert isinstance(error, StoreCorrupt)
    else:
        assert "error" in change  # SQLite keeps no NaN: it is nothing then.


# --- content


def _text(tmp_path: Path) -> Path:
    path = tmp_path / "a.tsv"
    path.write_text(format_table(table(ok("extend:0+1"), ok("extend:0+2"), ok("extend:0+3"))))
    return path


@pytest.mark.parametrize(
    ("old", "new"),
    [("\t100\t", "\t99\t"), ("# sms = 132", "# sms = 99"), ("# driver = 580", "# driver = 590")],
)
def test_text_that_was_changed_is_refused(
    old: str, new: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _text(tmp_path)
    path.write_text(path.read_text().replace(old, new, 1))

    with pytest.raises(StoreCorrupt, match="was changed since it was written"):
        read_text(path)
    caplog.clear()
    assert "a.tsv" not in _open(path).source
    assert "was changed since" in caplog.text


def test_a_table_without_content_is_read(tmp_path: Path) -> None:
    path = _text(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("# content")))

    assert len(read_text(path).measurements) == 3


def test_the_weights_that_earlier_versions_wrote_are_passed_over(tmp_path: Path) -> None:
    path = _text(tmp_path)
    plain = read_text(path)
    lines = [line for line in path.read_text().splitlines(keepends=True) if "# content" not in line]
    place = next(i for i, line in enumerate(lines) if line.startswith("point"))
    lines[place:place] = ["# weights = 57 26\n", '# weights decode = {"models":7}\n']
    path.write_text("".join(lines))

    assert read_text(path) == plain
    assert read_key(path) == plain.key


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    text = format_table(table(ok("extend:0+1"))).replace("\t0.001\t-", "\t0.001\t\\ud800")
    path.write_text(text)

    with pytest.raises(StoreCorrupt, match="half a character"):
        read_text(path)


# --- a place for somebody without a home


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that all may write, for a user without a home."""

    def no_home(path: Path) -> Path:
        raise RuntimeError(f"no home for {path}")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)
    return tmp_path / f"nsa-tune-{os.getuid()}"


def test_without_a_home_the_place_is_private(temporary: Path) -> None:
    path = default_database()

    assert path.is_relative_to(temporary)
    assert temporary.stat().st_mode & 0o777 == 0o700
    Store.open(path).close()
    assert path in list(sources(None))


def _planted(place: Path) -> Path:
    path = place / "share" / "nsa-tune" / "nsa-tune.db"
    path.parent.mkdir(parents=True)
    Store.open(path).close()
    return path


def _a_link(temporary: Path) -> None:
    elsewhere = temporary.with_name("elsewhere")
    _planted(elsewhere)
    elsewhere.chmod(0o700)
    temporary.symlink_to(elsewhere)


def _of_another(temporary: Path) -> None:
    _planted(temporary)
    temporary.chmod(0o700)
    os.chown(temporary, 12345, 12345)


def _open_to_all(temporary: Path) -> None:
    _planted(temporary)
    temporary.chmod(0o777)


@pytest.mark.parametrize("plant", [_a_link, _of_another, _open_to_all])
def test_what_others_planted_there_is_not_believed(
    plant: Callable[[Path], None], temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if plant is _of_another and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    plant(temporary)

    assert [
        path for path in sources(None) if "shipped" not in str(path) and path.suffix == ".db"
    ] == []
    assert "nothing in it is believed" in caplog.text
    with pytest.raises(StoreError, match="set NSA_TUNE_DB"):
        default_database()


# --- a database of another user


def test_reading_leaves_nothing_beside_a_database_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _database(tmp_path / "a.db")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    with closing(connect_read_only(path)) as connection:
        connection.execute("SELECT count(*) FROM keys").fetchone()
        assert [one.name for one in tmp_path.iterdir()] == ["a.db"]
    assert len(read_database(path)) == 1


def test_an_open_log_of_another_user_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _database(tmp_path / "a.db")
    (tmp_path / "a.db-wal").write_bytes(b"x" * 100)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    with pytest.raises(StoreError, match="would lock its owner out"):
        read_database(path)


def test_an_owner_is_told_who_locks_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _database(tmp_path / "a.db")
    (tmp_path / "a.db-shm").touch()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    error = sqlite3.OperationalError("attempt to write a readonly database")
    error.sqlite_errorcode = sqlite3.SQLITE_READONLY

    with (
        pytest.raises(StoreError, match=r"a\.db-shm belongs to another user"),
        store_errors(path, writing=True),
    ):
        raise error


def test_a_report_of_a_text_table_is_of_that_alone(tmp_path: Path) -> None:
    found = select_tables(_text(tmp_path), TableFilter())

    assert [one.source for one in found] == [str(tmp_path / "a.tsv")]


def test_logging_of_surrogates(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.WARNING)

    assert _open(tmp_path / "\ud800.db") is not None
    assert _open(tmp_path / "\ud800.tsv") is not None
    assert _open(Path("a\0.tsv")) is not None
    assert all(record.getMessage().encode() for record in caplog.records)
