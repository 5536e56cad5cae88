"""The service's own database: tokens, jobs, workers, weights of batches, findings.

It lies beside the database with the tables, in a file of its own: that one is handed out whole.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Self

from nsa_tune._errors import StoreCorrupt, StoreError, StoreMissing, StoreNewer, StoreReadOnly
from nsa_tune.db.connection import check_regular_file, store_errors

_log = logging.getLogger(__name__)
_MARK = 0x6E736174
"""SQLite's application_id of such a file: "nsat"."""
_BUSY_TIMEOUT_S = 4.0
"""A request waits so long for another process's transaction, and as long for another thread's."""
_MIGRATIONS = (
    """
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
""",
    """
    -- Seconds since 1970, as every time that is a number.
    ALTER TABLE jobs ADD COLUMN asked_last REAL NOT NULL DEFAULT 0;
    ALTER TABLE jobs ADD COLUMN started REAL;
    -- How far the worker's sweep is, as the worker says.
    ALTER TABLE jobs ADD COLUMN batches INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE jobs ADD COLUMN batches_done INTEGER NOT NULL DEFAULT 0;
    UPDATE jobs SET asked_last = CAST(strftime('%s', 'now') AS REAL);
    CREATE INDEX jobs_by_sender ON jobs (created_by, state);
    CREATE INDEX workers_by_time ON workers (seen);
    CREATE TABLE weighted (
        gpu TEXT NOT NULL,
        model TEXT NOT NULL,
        heads INTEGER NOT NULL,
        kv_layout TEXT NOT NULL,
        sender TEXT NOT NULL,  -- the token that made the table known
        added REAL NOT NULL,  -- when a log last had it
        PRIMARY KEY (gpu, model, heads, kv_layout)
    ) WITHOUT ROWID;
    INSERT INTO weighted
        SELECT DISTINCT gpu, model, heads, kv_layout, '', CAST(strftime('%s', 'now') AS REAL)
        FROM weights;
""",
)
"""Statements that make each version out of the one before."""


def state_path(database: Path) -> Path:
    """Where the service of the tables in `database` keeps what is its own."""
    return database.with_name(f"{database.stem}.service.db")


class _Connection:
    """One connection, which one thread at a time uses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sqlite = sqlite3.connect(
            path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        self.sqlite.row_factory = sqlite3.Row
        self.sqlite.execute("PRAGMA trusted_schema = OFF")
        self._lock = Lock()

    @contextmanager
    def held(self, *, writing: bool) -> Iterator[sqlite3.Connection]:
        if not self._lock.acquire(timeout=_BUSY_TIMEOUT_S):
            raise StoreError(f"{self.path} is locked by another request; try again")
        try:
            with store_errors(self.path, writing=writing):
                yield self.sqlite
        finally:
            self._lock.release()


class State(AbstractContextManager["State"]):
    """The open database. Every thread may use it. Who reads waits for nobody who writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as opened, store_errors(path, writing=True):
            self._writer = _Connection(path)
            opened.callback(self._writer.sqlite.close)
            self._prepare()
            self._reader = _Connection(path)
            opened.callback(self._reader.sqlite.close)
            self._reader.sqlite.execute("PRAGMA query_only = ON")
            self._opened = opened.pop_all()

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> Self:
        """The database at `path`, which only this user may read.

        Raises:
            StoreMissing: when there is none and `create` is false.
            StoreError: when it cannot be used, belongs to somebody else, or is something else.
        """
        try:
            check_regular_file(path)
        except StoreMissing:
            if not create:
                raise StoreMissing(f"there is no {path}; `nsa-tune serve` makes it") from None
        _make_private(path)
        return cls(path)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for statements that change nothing."""
        with self._reader.held(writing=False) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A connection in a transaction; on the disk when the block has ended."""
        with self._writer.held(writing=True) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.rollback()

    @property
    def version(self) -> int:
        """A number that differs whenever something was changed."""
        with self.reading() as connection:
            (version,) = connection.execute("PRAGMA data_version").fetchone()
        return int(version)

    def _prepare(self) -> None:
        with self.writing() as connection:
            (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            (mark,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if objects and mark != _MARK:
                raise StoreCorrupt(f"{self.path} is a database, but not one of `nsa-tune serve`")
            if version > len(_MIGRATIONS):
                raise StoreNewer(
                    f"{self.path} was written by a newer nsa-tune (version {version}, this one "
                    f"reads {len(_MIGRATIONS)}); upgrade nsa-tune"
                )
            for migration in _MIGRATIONS[version:]:
                for statement in filter(str.strip, migration.split(";\n")):
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_MARK}")
            connection.execute(f"PRAGMA user_version = {len(_MIGRATIONS)}")
        # So that `nsa-tune token` and the service need not wait for each other's reading.
        self._writer.sqlite.execute("PRAGMA journal_mode = WAL")
        self._writer.sqlite.execute("PRAGMA synchronous = FULL")


def _make_private(path: Path) -> None:
    """Make `path`, or take an existing file of this user, and let nobody else read it: SQLite gives
    its log the same mode.

    Raises:
        StoreError: when it is a link, or belongs to another user.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(path, flags, 0o600)
    except OSError as error:
        what = "is a link" if path.is_symlink() else f"cannot be made ({error.strerror})"
        raise StoreReadOnly(f"{path} {what}; `nsa-tune serve` keeps its tokens there") from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise StoreError(f"{path} belongs to another user, or is no file: it is not trusted")
        if status.st_mode & 0o077:
            os.fchmod(file, 0o600)
            _log.warning("%s could be read by others: it is this user's alone now", path)
            for end in ("-wal", "-shm"):
                with suppress(FileNotFoundError):
                    path.with_name(f"{path.name}{end}").chmod(0o600)
    finally:
        os.close(file)
