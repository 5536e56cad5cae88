"""A database with values of other kinds than ours is read, or refused with one sentence."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune import Batch, Dispatcher, NsaTuneError
from nsa_tune.db import connection as opening
from nsa_tune.db import places
from nsa_tune.db.checks import Anchor, Check, read_checks
from nsa_tune.db.history import read_histories
from nsa_tune.db.reader import keys_in, read_database
from nsa_tune.db.runs import newest_of, run_table, runs_of, state_of
from nsa_tune.db.store import Store
from tests.db.loose import COLUMNS, loosen
from tests.records import DEVICE, KEY, failed, ok
from tests.shell import Shell

CELLS = [(table, column) for table, columns in COLUMNS.items() for column in columns]
STRANGE = (None, "[1]", -1, 0.5, b"\xff")
READERS: tuple[Callable[[Path], object], ...] = (
    read_database, keys_in, read_histories, read_checks, runs_of, newest_of, state_of,
    lambda path: run_table(path, 1),
)  # fmt: skip


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """One table, two runs, a limit and a check; its columns take values of any kind, or none."""
    path = tmp_path / "t.db"
    with Store.open(path) as store:
        for batch in ("extend:0+64", "extend:512+64", "extend:0+128"):
            run = store.begin_run(KEY, DEVICE, {"points": ["prefill"]})
            store.add(
                run, [ok(batch), ok(batch, "mla/flashmla_sparse"), failed(batch, "mha/fa2", "no")]
            )
            store.add_limits(run, {"rows": (7, "it ended")})
            store.end_run(run, "done")
        anchor = Anchor("prefill", "extend:0+64", {"mha/fa3": 1.0}, {"mha/fa3": 1.0})
        store.add_check(Check(KEY.digest, "1", (("torch", "2"),), "2026", True, 0.0, (anchor,)))
    loosen(path)
    return path


def _set(path: Path, table: str, column: str, value: object) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute(
            f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT max(rowid) FROM {table})",
            [value],
        )
        connection.commit()


def opened() -> Dispatcher:
    return Dispatcher.open(gpu=KEY.gpu, model=KEY.model, heads=KEY.heads, kv_dtype="fp8")


@pytest.mark.parametrize(("table", "column"), CELLS)
def test_no_value_raises_anything_but_a_sentence(
    table: str, column: str, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_TUNE_DB", str(database))
    # The next source takes longer to open than all of this; another test asks it.
    monkeypatch.setattr(places, "shipped", list)
    good = database.read_bytes()
    for value in STRANGE:
        database.write_bytes(good)
        _set(database, table, column, value)

        for read in READERS:
            with suppress(NsaTuneError):
                read(database)
        with suppress(NsaTuneError), Store.open(database) as store:
            store.table(KEY)
            store.current(KEY)
        assert opened().plan(Batch.extend([512], [64])).prefill_path in ("mha", "mla")


# --- one bad source


NO_BATCH = ("measurements", "batch", None)


def test_the_next_source_answers_for_a_damaged_one(
    database: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = tmp_path / "data" / "nsa-tune" / "nsa-tune.db"
    own.parent.mkdir(parents=True)
    own.write_bytes(database.read_bytes())
    _set(database, *NO_BATCH)
    monkeypatch.setenv("NSA_TUNE_DB", str(database))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    dispatcher = opened()

    assert dispatcher.source.startswith(str(own))
    assert dispatcher.reload() is None
    assert f"{database} is damaged" in caplog.text


@pytest.mark.parametrize(
    "words",
    [
        ("db", "list", "--db", "T"), ("report", "--format", "json", "--db", "T"),
        ("db", "export", "-o", "x.tsv", "--db", "T"), ("compare", "T", "T"),
    ],
)  # fmt: skip
def test_commands_end_with_a_sentence(words: tuple[str, ...], database: Path, shell: Shell) -> None:
    _set(database, *NO_BATCH)

    answer = shell(*(str(database) if word == "T" else word for word in words))

    assert answer.code == 1
    assert answer.err.startswith("error: ") or "is damaged" in answer.err
    assert "Traceback" not in answer.err


# --- budgets


def test_many_tables_are_read_where_one_could_not_take_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is a table's: a database of a hundred ordinary tables is an ordinary one."""
    path = tmp_path / "many.db"
    with Store.open(path) as store:
        for driver in range(100):
            run = store.begin_run(replace(KEY, driver=str(driver)), DEVICE, {})
            store.add(run, [ok(f"extend:{prefix}+64") for prefix in range(100)])
    used = iter(range(10**6))
    # A clock that counts: a hundred looks are a table's budget, and each table takes some.
    monkeypatch.setattr(opening, "thread_time", lambda: next(used) / 20)
    monkeypatch.setattr(opening, "_STEPS", 100)

    assert len(read_database(path)) == 100
    assert len(read_histories(path)) == 100
