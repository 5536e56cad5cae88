"""Reading the tables in one file, a database or a text table, without changing it.

Needs the standard library only. The file may be anybody's: each value's type is checked before the
value is used, so that a file is read or refused with one sentence.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nsa_tune._errors import StoreCorrupt, StoreMissing
from nsa_tune.backend.types.records import Device, Key, StoredTable, Table
from nsa_tune.db.connection import SCHEMA_VERSION, reading, renew_budget
from nsa_tune.db.text_table import (
    MOST_ROWS,
    check_sequences,
    checked_measurement,
    read_key,
    read_text,
)
from nsa_tune.db.values import checked, count_of, text_of

KEYS = "SELECT id, gpu, driver, libraries, model, heads, kv_layout, protocol FROM keys ORDER BY id"
_DISCARDED_SINCE = 3
"""The schema that counts discarded samples."""
LIMITS_SINCE = 4
"""The schema that has limits."""
_PASS_SINCE = 6
"""The schema that has what an arm takes once a pass."""
# Not by id: merging an older database must not change the device, nor the order of merging.
_DEVICE = (
    "SELECT name, arch, sms, shared_memory_optin, memory, l2 FROM devices "
    "JOIN runs ON runs.device_id = devices.id WHERE key_id = ? "
    "ORDER BY started_at DESC, arch, sms, shared_memory_optin, memory, l2 LIMIT 1"
)
_LIMITS = (
    "SELECT name, value FROM limits JOIN runs ON runs.id = run_id WHERE key_id = ? "
    "ORDER BY found_at, limits.id"
)
_NEWEST = "SELECT max(measured_at) FROM measurements JOIN runs ON runs.id = run_id WHERE key_id = ?"
_ROWS = (
    "SELECT {columns}, measured_at, measurements.id FROM measurements "
    "JOIN runs ON runs.id = run_id WHERE key_id = ?"
)
_TIME = 12
"""Which of these columns the time is."""
MOST_STORED = 2**18
"""Measurements of one key that are read, older ones among them."""
MOST_KEYS = 4096
"""Tables of one database that are read."""


class Filter(Protocol):
    """What a table's key must be like."""

    def matches(self, key: Key) -> bool:
        """Whether a table with this `key` is taken."""


class Wanted(NamedTuple):
    """The fields of a key that a caller asks for; driver and libraries may differ."""

    gpu: str
    model: str
    heads: int
    kv_layout: str

    def matches(self, key: Key) -> bool:
        """Whether `key` has all four."""
        return self == (key.gpu, key.model, key.heads, key.kv_layout)


# --- both kinds of file


def keys_in(path: Path) -> list[Key]:
    """The keys of the tables in the file `path`; no measurement is read.

    Raises:
        StoreError: when it cannot be read.
    """
    if path.suffix == ".tsv":
        return [read_key(path)]
    with reading(path) as (connection, version):
        keys = wanted_keys(connection) if version else []
        return [key for number, key in keys if _newest_time(connection, number)]


def stored_in(path: Path, wanted: Wanted) -> list[StoredTable]:
    """The tables in the file `path` that are `wanted`; a database's measurements are read later.

    Raises:
        StoreError: when it cannot be read.
    """
    if path.suffix == ".tsv":
        if not wanted.matches(read_key(path)):
            return []
        table = read_text(path)
        return [StoredTable(table, lambda: table)]
    with reading(path) as (connection, version):
        heads = [
            _head_of(connection, path, number, key, newest, version)
            for number, key in (wanted_keys(connection, wanted) if version else [])
            if (newest := _newest_time(connection, number))
        ]
    return [StoredTable(head, partial(table_in, path, head.key)) for head in heads]


def tables_in(path: Path, wanted: Filter | None = None) -> list[Table]:
    """Every table in the file `path`, or those that are `wanted`, in the order of their keys.

    Raises:
        StoreError: when it cannot be read.
    """
    if path.suffix != ".tsv":
        return read_database(path, wanted)
    return [read_text(path)] if wanted is None or wanted.matches(read_key(path)) else []


def newest_in(path: Path, wanted: Wanted | None = None) -> str:
    """When the newest of the `wanted` tables in the file `path` was measured last; "" where there
    is none.

    Raises:
        StoreError: when it is no table or database, or one of these tables cannot be read.
    """
    if path.suffix == ".tsv":
        table = read_text(path)
        return table.measured_at if wanted is not None and wanted.matches(table.key) else ""
    with reading(path) as (connection, version):
        if not version:
            raise StoreCorrupt(f"{path} is an empty database")
        tables = [
            table_of(connection, path, number, key, version)
            for number, key in wanted_keys(connection)
            if wanted is not None and wanted.matches(key)
        ]
    return max((table.measured_at for table in tables), default="")


# --- databases


def read_database(path: Path, wanted: Filter | None = None) -> list[Table]:
    """Every table in the database `path`, or those that are `wanted`, in the order of their keys.

    Of several measurements of one arm on one batch the newest counts. Keys without a measurement
    are left out.

    Raises:
        StoreMissing: when there is no such file.
        StoreNewer: when a newer nsa-tune wrote it.
        StoreCorrupt: when it is no database of nsa-tune, or damaged.
    """
    with reading(path) as (connection, version):
        keys = wanted_keys(connection, wanted) if version else []
        tables = [table_of(connection, path, number, key, version) for number, key in keys]
    return [table for table in tables if table.measurements]


def table_in(path: Path, key: Key) -> Table:
    """The table of `key` in the database `path`, perhaps without measurements.

    Raises:
        StoreError: when it cannot be read, or has no such key.
    """
    with reading(path) as (connection, version):
        for number, other in wanted_keys(connection) if version else []:
            if other == key:
                return table_of(connection, path, number, key, version)
    raise StoreMissing(f"{path} no longer has the table {key.digest}")


def wanted_keys(
    connection: sqlite3.Connection, wanted: Filter | None = None
) -> Iterator[tuple[int, Key]]:
    """(number, key) of each key that is `wanted`, or of all. What a caller computes for one of them
    has a budget of its own.

    Raises:
        ValueError: when a key is not what nsa-tune writes.
    """
    rows = connection.execute(KEYS).fetchmany(MOST_KEYS + 1)
    if len(rows) > MOST_KEYS:
        raise ValueError(f"more than {MOST_KEYS} keys")
    for number, key in [(number, key_of(row)) for number, *row in rows]:
        if wanted is None or wanted.matches(key):
            renew_budget(connection)
            yield number, key


def table_of(
    connection: sqlite3.Connection, path: Path, number: int, key: Key,
    version: int = SCHEMA_VERSION,
) -> Table:  # fmt: skip
    """The newest measurements of the key with this `number` in an open database of the schema
    `version`, perhaps none.

    Raises:
        ValueError: when a row is not what nsa-tune writes.
    """
    rows = _newest_rows(connection, number, version)
    newest = max((row[_TIME] for row in rows), default="")
    measurements = tuple(checked_measurement(*row[:_TIME]) for row in rows)
    check_sequences(row.batch for row in measurements)
    return replace(
        _head_of(connection, path, number, key, newest, version),
        measurements=measurements,
        times={row[:3]: row[_TIME] for row in rows if row[_TIME] != newest},
    )


def measurement_columns(version: int = SCHEMA_VERSION) -> str:
    """SQL for what `checked_measurement` takes, in a schema of this `version`."""
    columns = "point, batch, arm, status, latency_us, low_us, high_us, samples, error, reason"
    discarded = "discarded" if version >= _DISCARDED_SINCE else "0"
    return f"{columns}, {discarded}, {'pass_us' if version >= _PASS_SINCE else 'NULL'}"


def _newest_rows(
    connection: sqlite3.Connection, number: int, version: int
) -> list[tuple[Any, ...]]:
    """What the view `newest` has for the key with this `number`, in a third of its time, in any
    order: the fields of a measurement, when it was measured, and its id."""
    query = _ROWS.format(columns=measurement_columns(version))
    rows = connection.execute(query, [number]).fetchmany(MOST_STORED + 1)
    if len(rows) > MOST_STORED:
        raise ValueError(f"more than {MOST_STORED} measurements of one key")
    if not all(type(row[_TIME]) is str for row in rows):
        raise ValueError("a time of measurement that is no text")
    if len({row[:3] for row in rows}) < len(rows):
        rows.sort(key=itemgetter(_TIME, -1))
        rows = list({row[:3]: row for row in rows}.values())
    if len(rows) > MOST_ROWS:
        raise ValueError(f"more than {MOST_ROWS} measurements of one key, of which none is newer")
    return rows


def _newest_time(connection: sqlite3.Connection, number: int) -> str:
    """When the key with this `number` was last measured under; "" where it never was."""
    (time,) = connection.execute(_NEWEST, [number]).fetchone()
    return "" if time is None else text_of(time)


def _head_of(
    connection: sqlite3.Connection, path: Path, number: int, key: Key, measured_at: str,
    version: int,
) -> Table:  # fmt: skip
    """The table of the key with this `number`, without its measurements."""
    facts = connection.execute(_DEVICE, [number]).fetchone()
    if facts is None:
        raise ValueError("a key without a device")
    limits = limits_of(connection, number, version)
    return Table(key, device(facts), (), str(path), measured_at, limits)


def limits_of(
    connection: sqlite3.Connection, number: int, version: int = SCHEMA_VERSION
) -> dict[str, int]:
    """The limits that probes found under the key with this `number`, the newest of each name.

    Raises:
        ValueError: when a row is not what nsa-tune writes.
    """
    rows = connection.execute(_LIMITS, [number]) if version >= LIMITS_SINCE else ()
    return {text_of(name): count_of(value) for name, value in rows}


def key_of(facts: Sequence[object]) -> Key:
    """The key of a row of its facts, each checked."""
    return Key(*checked(_KEY, facts))


def device(facts: Sequence[object]) -> Device:
    """The device of a row of its facts, each checked."""
    return Device(*checked((text_of, text_of, count_of, count_of, count_of, count_of), facts))


def _libraries(libraries: object) -> tuple[tuple[str, str], ...]:
    versions = json.loads(text_of(libraries))
    if not isinstance(versions, dict):
        raise ValueError("libraries that are no JSON object")
    pairs = tuple((name, str(version)) for name, version in versions.items())
    # JSON may hold half a character, which nothing can print.
    "".join(chain.from_iterable(pairs)).encode()
    return pairs


_KEY = (text_of, text_of, _libraries, text_of, count_of, text_of, text_of)
