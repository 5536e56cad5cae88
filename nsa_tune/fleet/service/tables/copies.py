"""What hosts pull: the whole database as one file, and its tables as texts, with their hashes.

Each is made once for a state of the database, however many ask for it, and nobody waits for more
than one to be made.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Generic, NamedTuple, TypeVar

from starlette.concurrency import run_in_threadpool

from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db import reader
from nsa_tune.db.connection import store_errors
from nsa_tune.db.exchange import write_text

Made = TypeVar("Made")


class Copy(NamedTuple):
    """A body, and its SHA-256 in hex."""

    body: bytes
    sha256: str

    @classmethod
    def of(cls, body: bytes) -> Copy:
        """`body` with its hash."""
        return cls(body, hashlib.sha256(body).hexdigest())


class Current(Generic[Made]):
    """What `make` makes of the database `path`, made anew when that has changed."""

    def __init__(self, path: Path, make: Callable[[], Made]) -> None:
        self._path = path
        self._make = make
        self._connection: sqlite3.Connection | None = None
        self._lock = asyncio.Lock()
        self._made: Made | None = None
        self._version = -1
        self._begun = 0.0

    async def get(self) -> Made:
        """What is made of a state of the database no older than this call.

        Raises:
            StoreError: when the database cannot be read.
        """
        asked = monotonic()
        async with self._lock:
            # While uploads come without a pause, each of many who wait would find a new state.
            if self._made is None or self._begun < asked:
                await run_in_threadpool(self._look)
            assert self._made is not None
            return self._made

    def close(self) -> None:
        """Close the connection that looks for changes."""
        if self._connection is not None:
            self._connection.close()

    def _look(self) -> None:
        begun, version = monotonic(), self._state()
        if self._made is None or version != self._version:
            self._made = self._make()
            self._version = version
        self._begun = begun

    def _state(self) -> int:
        """A number that differs whenever somebody has written, the weights too."""
        with store_errors(self._path):
            if self._connection is None:
                uri = f"{self._path.absolute().as_uri()}?mode=ro"
                self._connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        return int(version)


def copy_of(path: Path) -> Copy:
    """The database `path` at one moment as one file: without a log beside it, and byte by byte the
    same for the same content.

    Raises:
        StoreError: when it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="nsa-tune-copy-") as directory:
        whole = Path(directory, "copy.db")
        with store_errors(path):
            connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            try:
                connection.execute("VACUUM INTO ?", [str(whole)])
            finally:
                connection.close()
        return Copy.of(whole.read_bytes())


class TextTable(NamedTuple):
    """One table as `nsa-tune db export` writes it."""

    key: Key
    rows: int
    measured_at: str
    text: Copy


class TextTables:
    """The tables of a database as texts; those that did not change are not written again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[Key, tuple[Table, TextTable]] = {}

    def all(self) -> list[TextTable]:
        """Every table.

        Raises:
            StoreError: when the database cannot be read.
        """
        found: dict[Key, tuple[Table, TextTable]] = {}
        for table in reader.read_database(self._path):
            known = self._known.get(table.key)
            if known is None or known[0] != table:
                known = table, _as_text(table)
            found[table.key] = known
        self._known = found
        return [text for _, text in found.values()]


def _as_text(table: Table) -> TextTable:
    with tempfile.TemporaryDirectory(prefix="nsa-tune-text-") as directory:
        path = Path(directory, "table.tsv")
        write_text(table, path)
        text = Copy.of(path.read_bytes())
    return TextTable(table.key, len(table.measurements), table.measured_at, text)
