"""Opening databases that somebody else may have made, without changing them, and what goes wrong.

Needs the standard library only, as everything that an engine reads tables by.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from time import thread_time
from typing import Self

from nsa_tune._errors import StoreCorrupt, StoreError, StoreMissing, StoreNewer, StoreReadOnly

SCHEMA_VERSION = 12
"""The newest database schema that this version reads and writes."""

_BUSY_TIMEOUT_S = 10.0
_TABLES = frozenset(
    {
        "checks", "devices", "keys", "limits", "measurements", "nsa_tune_migrations", "runs",
    }
)  # fmt: skip
_LONGEST_VALUE = 2**26
"""Bytes of a text, and of a row."""
_MOST_CPU_S, _STEPS = 5.0, 100_000
"""What reading may compute: a table takes milliseconds. Steps of SQLite between two looks."""
DAMAGE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""What a value of another kind than ours may come to."""


# --- what goes wrong


@contextmanager
def store_errors(path: Path, *, writing: bool = False) -> Iterator[None]:
    """Turn SQLite's errors about `path` into a StoreError that says what to do."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a mistake in nsa-tune, not in the file
    except UnicodeError as error:
        raise _damaged(path, error) from error  # a name in the schema that is no UTF-8
    except sqlite3.Error as error:
        raise _translated(path, error, writing) from error


@contextmanager
def damage_errors(path: Path) -> Iterator[None]:
    """Turn what comes of a value in `path` that nsa-tune does not write into a StoreCorrupt."""
    try:
        yield
    except DAMAGE as error:
        raise _damaged(path, error) from error


def _translated(path: Path, error: sqlite3.Error, writing: bool) -> StoreError:
    code = getattr(error, "sqlite_errorcode", None)
    match code & 0xFF if code is not None else None:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreError(
                f"{path} is locked by another process; wait until that one ends and try again"
            )
        case sqlite3.SQLITE_INTERRUPT:
            return StoreCorrupt(
                f"{path} takes longer to read than any table does; move it away, or give another "
                "database with --db"
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN if writing:
            return StoreReadOnly(_why_not_written(path))
        case sqlite3.SQLITE_READONLY:
            return StoreReadOnly(f"{path} cannot be read, as its log cannot be written")
        case sqlite3.SQLITE_CANTOPEN:
            return StoreError(f"{path} cannot be opened; check who may read it and its directory")
        case sqlite3.SQLITE_FULL:
            return StoreError(
                f"the disk is full under {path}; free some space and run again: "
                "what was stored before is kept"
            )
        case sqlite3.SQLITE_IOERR:
            return StoreError(f"{path}: {error}; check the disk, or use a database elsewhere")
        case sqlite3.SQLITE_CONSTRAINT:
            return StoreError(f"{path} does not take such a row: {error}")
        case sqlite3.SQLITE_NOTADB:
            return StoreCorrupt(
                f"{path} is not an SQLite database; give the path of another with --db"
            )
    return StoreCorrupt(
        f"{path} is damaged ({error}); move it away, or put a copy of it in its place"
    )


def _why_not_written(path: Path) -> str:
    for end in ("-shm", "-wal"):
        beside = path.with_name(f"{path.name}{end}")
        with suppress(OSError):
            if beside.stat().st_uid != os.geteuid() and os.access(path, os.W_OK):
                return (
                    f"{path} cannot be written: {beside} belongs to another user, who has read the "
                    "database; remove that file when nobody reads or writes the database"
                )
    return (
        f"{path} cannot be written; make it writable, and its directory, or give another database "
        "with --db"
    )


def _damaged(path: Path, error: Exception) -> StoreCorrupt:
    what = error if str(error) else type(error).__name__
    return StoreCorrupt(f"{path} is damaged ({what}); move it away")


# --- opening


def check_regular_file(path: Path) -> None:
    """Pass when `path` is a file.

    Raises:
        StoreMissing: when there is nothing.
        StoreError: when it is a directory or a device, or may not be looked at.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMissing(
            f"there is no file {path}; give another one, or measure one with `nsa-tune run`"
        ) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(f"{str(path)!r} is no path: {error}") from error
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise StoreError(f"{path} is {what}; give the path of a database file")


@contextmanager
def reading(path: Path) -> Iterator[tuple[sqlite3.Connection, int]]:
    """A connection that cannot change `path`, with one view of it whatever a tuner adds meanwhile,
    and the schema of the database; 0 when it is empty.

    Raises:
        StoreError: when it cannot be read, or its reader meets what nsa-tune does not write.
    """
    check_regular_file(path)
    with store_errors(path), damage_errors(path), closing(connect_read_only(path)) as connection:
        connection.execute("BEGIN")
        yield connection, schema_version(connection, path)


class _Restrained(sqlite3.Connection):
    """A connection that does not trust what somebody wrote into the schema, holds no value that is
    larger than any of ours, and stops when it computes for long."""

    def restrain(self) -> Self:
        self.execute("PRAGMA trusted_schema = OFF")
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        self.renew()
        return self

    def renew(self) -> None:
        end = thread_time() + _MOST_CPU_S
        self.set_progress_handler(lambda: thread_time() > end, _STEPS)


def renew_budget(connection: sqlite3.Connection) -> None:
    """Let a connection of `connect_read_only` compute for as long again, for another table."""
    if isinstance(connection, _Restrained):
        connection.renew()


def connect_read_only(path: Path) -> sqlite3.Connection:
    """A connection that cannot change `path`, in a directory that nobody may write too.

    SQLite's own errors leave it: use it within `store_errors`.
    """
    uri = path.absolute().as_uri()
    # SQLite makes a log and an index beside a WAL database even to read it. They would be ours, and
    # lock out an owner who is somebody else. With nothing in the log, the file alone is whole.
    if path.stat().st_uid != os.geteuid():
        if not _has_log(path):
            return _connected(f"{uri}?immutable=1").restrain()
        if not path.with_name(f"{path.name}-shm").exists():
            raise StoreError(
                f"{path} belongs to another user and was left with an open log: to read it would "
                "lock its owner out; ask the owner to run `nsa-tune db list` once"
            )
    connection = _connected(f"{uri}?mode=ro")
    try:
        connection.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        connection.close()
        # So does a directory that may not be written.
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
        if _has_log(path):
            raise
        connection = _connected(f"{uri}?immutable=1")
    return connection.restrain()


def _connected(uri: str) -> _Restrained:
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, factory=_Restrained)


def _has_log(path: Path) -> bool:
    log = path.with_name(f"{path.name}-wal")
    return log.exists() and log.stat().st_size > 0


def schema_version(connection: sqlite3.Connection, path: Path) -> int:
    """The schema of an open database; 0 when it is empty.

    Raises:
        StoreNewer: when this version does not know the schema.
        StoreCorrupt: when the database is not nsa-tune's.
    """
    kinds = dict(connection.execute("SELECT name, type FROM sqlite_master"))
    if not kinds:
        return 0
    if "nsa_tune_migrations" not in kinds:
        raise StoreCorrupt(
            f"{path} is a database, but not one of nsa-tune; give the path of another with --db"
        )
    # A view or a trigger computes what it likes, where rows are expected.
    for name, kind in kinds.items():
        if kind == "trigger" or (name in _TABLES and kind != "table"):
            raise StoreCorrupt(f"{path} has a {kind} {name}, which nsa-tune did not make")
    (version,) = connection.execute("SELECT max(version) FROM nsa_tune_migrations").fetchone()
    if not isinstance(version, int):
        raise StoreCorrupt(f"{path} does not say which schema it has; move it away")
    if version > SCHEMA_VERSION:
        raise StoreNewer(
            f"{path} was written by a newer nsa-tune (schema {version}, this one reads up to "
            f"{SCHEMA_VERSION}); upgrade nsa-tune, or give another database with --db"
        )
    return version
