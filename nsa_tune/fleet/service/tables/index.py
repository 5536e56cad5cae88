"""What tables the database has, known without reading any row twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from nsa_tune.backend.types.records import Key
from nsa_tune.db.connection import reading, store_errors
from nsa_tune.db.reader import KEYS, key_of
from nsa_tune.db.values import count_of, text_of

# No row is ever deleted or changed, so those that are new have the higher numbers.
_NEW_ROWS = (
    "SELECT key_id, count(*), max(measurements.id), max(measured_at), max(status = 'ok') "
    "FROM measurements JOIN runs ON runs.id = run_id WHERE measurements.id > ? GROUP BY key_id"
)
# The plus: by the key's runs, not by number, however few rows SQLite takes to be new.
_NEW_ROWS_OF_KEY = (
    "SELECT count(*), max(measurements.id), max(measured_at), max(status = 'ok'), "
    "(SELECT max(id) FROM runs WHERE key_id = ?1), (SELECT max(limits.id) FROM limits "
    "JOIN runs ON runs.id = run_id WHERE key_id = ?1) "
    "FROM runs JOIN measurements ON runs.id = run_id WHERE key_id = ?1 AND +measurements.id > ?2"
)
_NEWEST_RUNS = "SELECT key_id, max(id) FROM runs GROUP BY key_id"
_NEWEST_LIMITS = (
    "SELECT key_id, max(limits.id) FROM limits JOIN runs ON runs.id = run_id GROUP BY key_id"
)
_NEVER = -1
"""The version of what was not read yet."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One table."""

    number: int
    """Of its key in the database."""
    key: Key
    measurements: int = 0
    """Older ones too."""
    newest: int = 0
    """Number of the last measurement."""
    measured_at: str = ""
    succeeded: bool = False
    newest_run: int = 0
    newest_limit: int = 0

    @property
    def version(self) -> str:
        """64 hexadecimal digits that differ whenever the content does."""
        words = [self.key.digest, self.measurements, self.newest, self.measured_at,
                 self.newest_run, self.newest_limit]  # fmt: skip
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()


class Held(NamedTuple):
    """What there is at one moment."""

    entries: tuple[Entry, ...]
    """Tables in which something succeeded, oldest key first: the others answer nothing."""
    measurements: int
    version: int
    """Differs whenever anything was written."""

    def of(self, name: tuple[str | None, str, int, str]) -> tuple[Entry, ...]:
        """Those with this GPU (None: any), model, local heads and KV layout."""
        gpu, *rest = name
        return tuple(
            entry for entry in self.entries
            if gpu in (None, entry.key.gpu)
            and rest == [entry.key.model, entry.key.heads, entry.key.kv_layout]
        )  # fmt: skip

    @property
    def keys(self) -> tuple[Key, ...]:
        """Of the tables."""
        return tuple(entry.key for entry in self.entries)


class Index:
    """The tables of the database `path`. Call `close` at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[int, Entry] = {}
        self._newest = 0
        self._held = Held((), 0, _NEVER)
        self._lock = Lock()
        self._of_keys: dict[int, tuple[int, Entry]] = {}
        """By number: entries that were asked for by key, each with the version it was read at."""
        self._lock_of_keys, self._lock_of_version = Lock(), Lock()
        # Tells whether another connection has written.
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with store_errors(path):
            self._looking = sqlite3.connect(uri, uri=True, check_same_thread=False)

    def close(self) -> None:
        self._looking.close()

    def held(self) -> Held:
        """What the database holds now.

        Raises:
            StoreError: when it cannot be read.
        """
        with self._lock:
            version = self.version()
            if version != self._held.version:
                self._held = self._read(version)
            return self._held

    def version(self) -> int:
        """A number that differs whenever anything was written.

        Raises:
            StoreError: when it cannot be read.
        """
        with self._lock_of_version, store_errors(self._path):
            (version,) = self._looking.execute("PRAGMA data_version").fetchone()
        return int(version)

    def of(self, name: tuple[str | None, str, int, str]) -> tuple[Entry, ...]:
        """As `held().of(name)`, but reading those tables alone until all have been read once: after
        a restart no host waits for millions of rows of others.

        Raises:
            StoreError: when it cannot be read.
        """
        if self._held.version != _NEVER:
            return self.held().of(name)
        with self._lock_of_keys:
            version = self.version()
            with reading(self._path) as (connection, _):
                connection.set_progress_handler(None, 0)
                of_keys = self._of_keys
                for number, entry in _new_keys(connection, of_keys).items():
                    of_keys[number] = (_NEVER, entry)
                chosen = Held(tuple(entry for _, entry in of_keys.values()), 0, version).of(name)
                for entry in chosen:
                    if of_keys[entry.number][0] != version:
                        of_keys[entry.number] = version, _renewed(connection, entry)
            entries = [of_keys[entry.number][1] for entry in chosen]
        return tuple(entry for entry in entries if entry.succeeded)

    def _read(self, version: int) -> Held:
        with reading(self._path) as (connection, _):
            # The service's own database may take longer than a stranger's.
            connection.set_progress_handler(None, 0)
            entries = self._entries | _new_keys(connection, self._entries)
            for number, count, newest, at, succeeded in connection.execute(
                _NEW_ROWS, [self._newest]
            ):
                entry = entries[number]
                entries[number] = replace(
                    entry, measurements=entry.measurements + count, newest=count_of(newest),
                    measured_at=max(entry.measured_at, text_of(at)),
                    succeeded=entry.succeeded or bool(succeeded),
                )  # fmt: skip
            for query, name in ((_NEWEST_RUNS, "newest_run"), (_NEWEST_LIMITS, "newest_limit")):
                for number, newest in connection.execute(query):
                    changed: dict[str, Any] = {name: count_of(newest)}
                    entries[number] = replace(entries[number], **changed)
        self._entries = entries
        self._newest = max((entry.newest for entry in entries.values()), default=0)
        whole = tuple(entry for entry in entries.values() if entry.succeeded)
        return Held(whole, sum(entry.measurements for entry in entries.values()), version)


def _new_keys(connection: sqlite3.Connection, known: Container[int]) -> dict[int, Entry]:
    return {
        count_of(number): Entry(number, key_of(facts))
        for number, *facts in connection.execute(KEYS)
        if number not in known
    }


def _renewed(connection: sqlite3.Connection, entry: Entry) -> Entry:
    """`entry` with what was added since it was read."""
    row = connection.execute(_NEW_ROWS_OF_KEY, [entry.number, entry.newest]).fetchone()
    count, newest, at, succeeded, run, limit = row
    return replace(
        entry, measurements=entry.measurements + count, newest=count_of(newest or entry.newest),
        measured_at=max(entry.measured_at, text_of(at or "")),
        succeeded=entry.succeeded or bool(succeeded), newest_run=count_of(run or 0),
        newest_limit=count_of(limit or 0),
    )  # fmt: skip
