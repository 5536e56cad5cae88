"""The service's own database: tokens, jobs, workers, weights of batches, findings.

It lies beside the database with the tables, in a file of its own: that one is handed out whole.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Self

from nsa_tune._errors import StoreCorrupt, StoreMissing, StoreNewer, StoreReadOnly
from nsa_tune.db.connection import check_regular_file, store_errors

_VERSION = 1
_MARK = 0x6E736174
"""SQLite's application_id of such a file: "nsat"."""
_BUSY_TIMEOUT_S = 30.0
_SCHEMA = """
    CREATE TABLE tokens (
        name TEXT PRIMARY KEY,
        role TEXT NOT NULL CHECK (role IN ('read', 'submit', 'admin')),
        hash TEXT NOT NULL UNIQUE,  -- SHA-256 of the token
        created_at TEXT NOT NULL  -- ISO 8601, UTC, as every "_at"
    ) WITHOUT ROWID;
    CREATE TABLE jobs (
        id INTEGER PRIMARY KEY,
        state TEXT NOT NULL
            CHECK (state IN ('proposed', 'queued', 'running', 'done', 'failed', 'cancelled')),
        reason TEXT NOT NULL,
        gpu TEXT NOT NULL,
        model TEXT NOT NULL,
        heads INTEGER NOT NULL,  -- local heads
        kv_layout TEXT NOT NULL,
        driver TEXT,  -- NULL, as libraries: any
        libraries TEXT,  -- JSON: distribution to version, sorted
        points TEXT NOT NULL,  -- JSON: names of decision points; none means all
        fresh INTEGER NOT NULL,
        budget_s REAL,
        digest TEXT,  -- of the table that no longer holds
        created_at TEXT NOT NULL,
        created_by TEXT NOT NULL,
        asked INTEGER NOT NULL DEFAULT 1,
        claim TEXT,  -- what the worker chose; who knows it may end the job
        worker TEXT,
        beat REAL,  -- seconds since 1970 when the worker last said that it works
        attempts INTEGER NOT NULL DEFAULT 0,
        ended REAL,
        rows INTEGER NOT NULL DEFAULT 0,
        message TEXT NOT NULL DEFAULT ''
    );
    CREATE INDEX jobs_by_state ON jobs (state, gpu);
    CREATE TABLE workers (
        name TEXT PRIMARY KEY,
        gpu TEXT NOT NULL,
        driver TEXT NOT NULL,
        libraries TEXT NOT NULL,
        seen REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE findings (
        id INTEGER PRIMARY KEY,
        digest TEXT NOT NULL,  -- of the key whose table no longer holds
        point TEXT NOT NULL,
        document TEXT NOT NULL,
        found_by TEXT NOT NULL,
        found REAL NOT NULL,
        settled REAL  -- when a job had measured it again
    );
    CREATE INDEX findings_by_key ON findings (digest, point);
    CREATE TABLE weights (
        gpu TEXT NOT NULL,
        model TEXT NOT NULL,
        heads INTEGER NOT NULL,
        kv_layout TEXT NOT NULL,
        batch TEXT NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (gpu, model, heads, kv_layout, batch)
    ) WITHOUT ROWID;
    CREATE TABLE logs (
        id INTEGER PRIMARY KEY,
        first TEXT NOT NULL UNIQUE,  -- SHA-256 of the first line
        length INTEGER NOT NULL,
        content TEXT NOT NULL  -- SHA-256 of so many bytes
    );
"""


def state_path(database: Path) -> Path:
    """Where the service of the tables in `database` keeps what is its own."""
    return database.with_name(f"{database.stem}.service.db")


class State:
    """The open database. Every thread may use it; one at a time does."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._lock = RLock()
        self.path = path

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> Self:
        """The database at `path`, which only this user may read.

        Raises:
            StoreMissing: when there is none and `create` is false.
            StoreError: when it cannot be used, or is something else.
        """
        try:
            check_regular_file(path)
        except StoreMissing:
            if not create:
                raise StoreMissing(f"there is no {path}; `nsa-tune serve` makes it") from None
            _make_private(path)
        with store_errors(path, writing=True), ExitStack() as opened:
            connection = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            opened.callback(connection.close)
            connection.row_factory = sqlite3.Row
            state = cls(connection, path)
            state._prepare()
            opened.pop_all()
        return state

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for statements that change nothing."""
        with self._lock, store_errors(self.path):
            yield self._connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The connection in a transaction; on the disk when the block has ended."""
        with self._lock, store_errors(self.path, writing=True):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.rollback()

    @property
    def version(self) -> int:
        """A number that differs whenever another process has changed something."""
        with self.reading() as connection:
            (version,) = connection.execute("PRAGMA data_version").fetchone()
        return int(version)

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA trusted_schema = OFF")
        with self.writing() as connection:
            (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            (mark,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if objects == 0:
                for statement in filter(str.strip, _SCHEMA.split(";\n")):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_MARK}")
                connection.execute(f"PRAGMA user_version = {_VERSION}")
            elif mark != _MARK:
                raise StoreCorrupt(f"{self.path} is a database, but not one of `nsa-tune serve`")
            elif version > _VERSION:
                raise StoreNewer(
                    f"{self.path} was written by a newer nsa-tune (version {version}, this one "
                    f"reads {_VERSION}); upgrade nsa-tune"
                )
        # So that `nsa-tune token` and the service need not wait for each other's reading.
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")


def _make_private(path: Path) -> None:
    """An empty file that nobody else may read: SQLite gives its log the same mode."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StoreReadOnly(f"{path} cannot be made ({error.strerror})") from error
