"""Bodies of answers: made once for a state of the database, kept in files, and sent in blocks.

A body may be half a gigabyte, and two thousand hosts may take it at once: no answer holds it in
memory. Its file has no name any longer, so that nothing is left when the service is killed.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import shutil
import sqlite3
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic

from nsa_tune.db.connection import store_errors
from nsa_tune.db.reader import table_in
from nsa_tune.db.text_table import format_table
from nsa_tune.fleet.service.tables.index import Entry

BLOCK = 2**14
_LONGEST_PACKED = 2**25
"""Bytes that are compressed: a whole database would take a minute."""
_LEVEL = 3
"""Of compression: half of level 6's time, for a tenth more bytes."""
_MOST_KEPT = 128
_SLOW_S, _KEPT_FOR = 1.0, 10.0
"""What takes longer than a second to make is sent for ten times as long as it took."""

Make = Callable[[Path], object]
Kept = tuple[str, "Body", float]
"""Version, body, and until when it is sent whatever the version."""
InThread = Callable[[Callable[[], Kept]], Awaitable[Kept]]


class _File:
    """An open file without a name, and its size."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._number)
        self.size = os.fstat(self._number).st_size

    def block(self, begin: int) -> bytes:
        """What is in it from `begin` on, a block at most."""
        return os.pread(self._number, BLOCK, begin)


class Body:
    """A body, as it is and perhaps compressed; there as long as somebody refers to it."""

    def __init__(self, path: Path, version: str) -> None:
        self.version = version
        self.plain = _File(path)
        self.packed: _File | None = None
        with path.open("rb") as file:
            self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if self.plain.size <= _LONGEST_PACKED:
                file.seek(0)
                packed = path.with_name(f"{path.name}.gz")
                with gzip.GzipFile(packed, "wb", _LEVEL, mtime=0) as zipped:
                    shutil.copyfileobj(file, zipped)
                self.packed = _File(packed)


class Bodies:
    """The bodies that were asked for last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        """By name."""
        self._making: dict[str, asyncio.Lock] = {}

    async def get(self, name: str, version: str, make: Make, run: InThread) -> Body:
        """The body `name`, which `make` writes into a file when there is none of this version.
        `run` runs that in a thread.

        Raises:
            StoreError: when the database cannot be read.
        """
        async with self._making.setdefault(name, asyncio.Lock()):
            kept = self._kept.get(name)
            if kept is None or (kept[0] != version and monotonic() > kept[2]):
                kept = await run(lambda: _made(version, make))
            self._kept[name] = kept
            self._kept.move_to_end(name)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return kept[1]


def _made(version: str, make: Make) -> Kept:
    begun = monotonic()
    with tempfile.TemporaryDirectory(prefix="nsa-tune-body-") as folder:
        path = Path(folder, "body")
        make(path)
        body, now = Body(path, version), monotonic()
    return version, body, now + (_KEPT_FOR * (now - begun) if now - begun > _SLOW_S else 0.0)


# --- what is written


def whole(database: Path, into: Path) -> None:
    """Copy `database` at one moment into one file: without a log beside it, and byte by byte the
    same for the same content.

    Raises:
        StoreError: when it cannot be read.
    """
    uri = f"{database.absolute().as_uri()}?mode=ro"
    with store_errors(database), closing(sqlite3.connect(uri, uri=True)) as connection:
        connection.execute("VACUUM INTO ?", [str(into)])


def of_keys(database: Path, entries: Sequence[Entry], into: Path) -> None:
    """Copy the tables `entries` of `database` into a database of their own, byte by byte the same
    while they are the same.

    Raises:
        StoreError: when it cannot be read.
    """
    with store_errors(database), closing(sqlite3.connect(into, isolation_level=None)) as connection:
        # The file is thrown away when anything goes wrong.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("ATTACH ? AS whole", [f"{database.absolute().as_uri()}?mode=ro"])
        connection.execute("BEGIN")
        schema = connection.execute("SELECT type, name, sql FROM whole.sqlite_master").fetchall()
        for kind in ("table", "index", "view"):
            for _, _, sql in sorted(row for row in schema if row[0] == kind and row[2]):
                connection.execute(sql)
        numbers = ", ".join(str(entry.number) for entry in entries)
        names = {name for kind, name, _ in schema if kind == "table"}
        # Keys, then their runs, then what belongs to the runs.
        for name in sorted(names, key=lambda name: ("keys", "runs", name).index(name)):
            chosen = _chosen(connection, name, numbers)
            connection.execute(
                f"INSERT INTO main.{name} SELECT * FROM whole.{name} {chosen} ORDER BY rowid"
            )
        connection.execute("COMMIT")


def _chosen(connection: sqlite3.Connection, name: str, numbers: str) -> str:
    """The rows of the table `name` that belong to the keys of these `numbers`."""
    if name == "keys":
        return f"WHERE id IN ({numbers})"
    if name == "devices":
        return "WHERE id IN (SELECT device_id FROM main.runs)"
    columns = {row[1] for row in connection.execute(f"PRAGMA main.table_info({name})")}
    if "run_id" in columns:
        return "WHERE run_id IN (SELECT id FROM main.runs)"
    if "key_id" in columns:
        return f"WHERE key_id IN ({numbers})"
    return "WHERE digest IN (SELECT digest FROM main.keys)" if "digest" in columns else ""


def text_of(database: Path, entry: Entry, into: Path) -> None:
    """Write the table `entry` of `database` as `nsa-tune db export` does.

    Raises:
        StoreError: when it cannot be read.
    """
    text = format_table(table_in(database, entry.key))
    into.write_text(text, encoding="utf-8", newline="\n")
