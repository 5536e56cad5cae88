"""Reading measured tables, from SQLite databases and from text, with the standard library only.

The search order is: the database named by the caller, NSA_TUNE_DB, the user's data directory
(XDG_DATA_HOME), the site's (XDG_DATA_DIRS), then the tables that ship with the package. Where the
first two are addresses, the copies in the user's cache folder (XDG_CACHE_HOME) are read.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from nsa_tune._errors import StoreCorrupt, StoreError, StoreMissing
from nsa_tune.backend.types.records import Device, Key, Status, StoredTable, Table
from nsa_tune.db.connection import (
    check_regular_file,
    connect_read_only,
    damage_errors,
    schema_version,
    store_errors,
)
from nsa_tune.db.text_table import (
    MOST_ROWS,
    check_sequences,
    checked_measurements,
    read_key,
    read_text,
)
from nsa_tune.db.values import count_of, text_of
from nsa_tune.remote.address import address_in

if TYPE_CHECKING:
    from nsa_tune.remote.fetching import Fetched

_SHIPPED = Path(__file__).parent.parent / "tables"
_FILE = Path("nsa-tune", "nsa-tune.db")
_KEYS = "SELECT id, gpu, driver, libraries, model, heads, kv_layout, protocol FROM keys ORDER BY id"
_DISCARDED_SINCE = 3
"""The schema that counts discarded samples."""
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
_PASS_SINCE = 6
"""The schema that has what an arm takes once a pass."""
_NEWEST = "SELECT max(measured_at) FROM measurements JOIN runs ON runs.id = run_id WHERE key_id = ?"
_ANY = "SELECT 1 FROM measurements WHERE run_id IN (SELECT id FROM runs WHERE key_id = ?) LIMIT 1"
_ROWS = (
    "SELECT point, batch, arm, status, latency_us, low_us, high_us, samples, error, reason, "
    "{discarded}, {pass_us}, measured_at{id} FROM measurements JOIN runs ON runs.id = run_id "
    "WHERE key_id = ?"
)
_WIDTH = 13
MOST_STORED = 2**18
"""Measurements of one key that are read, older ones among them."""
MOST_KEYS = 4096
"""Tables of one database that are read."""
_log = logging.getLogger(__name__)
_names: dict[Path, str] = {}
"""What copies of addresses are called."""


class Wanted(NamedTuple):
    """The fields of a key that a caller asks for; driver and libraries may differ."""

    gpu: str
    model: str
    heads: int
    kv_layout: str

    def matches(self, key: Key) -> bool:
        """Whether `key` has all four."""
        return self == (key.gpu, key.model, key.heads, key.kv_layout)


# --- where tables are


def default_database() -> Path:
    """NSA_TUNE_DB, else nsa-tune/nsa-tune.db in the user's data directory.

    A user id without a home directory, as clusters have them, gets a private directory under the
    system's temporary one, with a warning.

    Raises:
        UsageError: when NSA_TUNE_DB is an address, and a wrong one.
        StoreError: when that directory is there, but belongs to somebody else, or when NSA_TUNE_DB
            is an address from which nothing could ever be fetched.
    """
    named = os.environ.get("NSA_TUNE_DB")
    if named and address_in(named) is not None:
        return local(Path(named))
    return _expanded(named) or _no_place() if named else user_database() or _no_place()


def database_to_write() -> Path:
    """The same, or the user's database, with a warning, where NSA_TUNE_DB is an address.

    Raises:
        UsageError, StoreError: as `default_database`.
    """
    named = os.environ.get("NSA_TUNE_DB")
    address = address_in(named) if named else None
    if address is None:
        return default_database()
    path = user_database() or _no_place()
    _log.warning("NSA_TUNE_DB is %s, which is only read: %s is written", address.shown, path)
    return path


def _no_place() -> NoReturn:
    raise StoreError(
        "there is no home directory, and a private one cannot be made in "
        f"{tempfile.gettempdir()}; set NSA_TUNE_DB"
    )


def shipped() -> list[Path]:
    """The text tables that came with the package, sorted by name."""
    return sorted(_SHIPPED.glob("*.tsv"))


def sources(db: Path | None, wanted: Wanted | None = None) -> Iterator[Path]:
    """Databases and text tables in the order in which they are searched.

    Paths that somebody named (`db`, NSA_TUNE_DB) come even where there is no such file; the
    standard places only where there is one.
    """
    return chain.from_iterable(grouped_sources(db, wanted))


def grouped_sources(db: Path | None, wanted: Wanted | None = None) -> Iterator[list[Path]]:
    """The same, those that count as one source together: the shipped tables."""
    yield from ([path] for path in _databases(db, wanted))
    yield shipped()


def find(db: Path | None, *, gpu: str, model: str, heads: int, kv_layout: str) -> list[Table]:
    """Tables with these four fields from the first source that has any, newest first.

    The shipped tables together are one source. A table in which nothing succeeded is passed over,
    and a source that cannot be read is skipped, with a warning if it is there.

    Raises:
        StoreError: when `db` is given and cannot be read.
    """
    for stored in find_stored(db, Wanted(gpu, model, heads, kv_layout)):
        found = [table for table in (one.read() for one in stored) if succeeded(table)]
        if found:
            return found
    return []


def find_stored(
    db: Path | None, wanted: Wanted, asked: Wanted | None = None
) -> Iterator[list[StoredTable]]:
    """As `find`, from one source after the other; only sources that have any. Whether a
    measurement succeeded is not asked. With `asked`, a service's answer for that is searched."""
    for places in grouped_sources(db, asked or wanted):
        found = [table for path in places for table in _usable(path, wanted, path == db)]
        if found:
            yield sorted(found, key=lambda table: table.head.measured_at, reverse=True)


def _usable(path: Path, wanted: Wanted, named: bool) -> list[StoredTable]:
    try:
        return _stored(path, wanted)
    except StoreError as error:
        if named:
            raise
        # That NSA_TUNE_DB is missing, `warn_of_missing_files` says once.
        if not isinstance(error, StoreMissing):
            _log.warning("%s is skipped: %s", path, error)
        return []


def succeeded(table: Table) -> bool:
    """Whether any measurement of `table` did."""
    return any(row.status is Status.OK for row in table.measurements)


def _databases(db: Path | None, wanted: Wanted | None) -> Iterator[Path]:
    named = os.environ.get("NSA_TUNE_DB")
    seen: set[Path] = set()
    for path in (_located(db, wanted) if db else None, _located(named, wanted) if named else None):
        if path is not None and path not in seen:
            seen.add(path)
            yield path
    site = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    standard = [user_database(), *(Path(place) / _FILE for place in site.split(":") if place)]
    # os.path, not Path: a directory that may not be searched is one without our file.
    yield from (
        path
        for path in standard
        if path is not None and path not in seen and os.path.isfile(path)  # noqa: PTH113
    )


def _located(place: str | Path, wanted: Wanted | None) -> Path | None:
    """Where `place` is read; None where there is no copy of an address, or no home directory."""
    found = fetched_from(place, wanted)
    if found is not None:
        return found.path
    return place if isinstance(place, Path) else _expanded(place)


def user_folder() -> Path | None:
    """The folder of the user's database, whether it is there or not; None where none is safe."""
    database = user_database()
    return None if database is None else database.parent


def user_database() -> Path | None:
    """The user's own database, whether it is there or not; None where no place for it is safe."""
    data = os.environ.get("XDG_DATA_HOME", "")
    if Path(data).is_absolute():
        return Path(data) / _FILE
    share = _expanded("~/.local/share")
    return None if share is None else share / _FILE


def _expanded(path: str) -> Path | None:
    """`path` with its user's home directory, or else a private one; None where there is neither."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        place = Path(tempfile.gettempdir(), f"nsa-tune-{os.getuid()}")
    problem = _not_private(place)
    if problem:
        _log.warning(
            "there is no home directory for %s, and %s %s: nothing in it is believed; set "
            "NSA_TUNE_DB", path, place, problem,
        )  # fmt: skip
        return None
    _log.warning("there is no home directory for %s: using %s; set NSA_TUNE_DB", path, place)
    return place / Path(path).name


def _not_private(place: Path) -> str:
    """Why somebody else may have put things into `place`, which is made if there is none; ""
    where nobody could."""
    try:
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        status = place.lstat()
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    if not stat.S_ISDIR(status.st_mode):
        return "is no directory"
    if status.st_uid != os.getuid():
        return "belongs to another user"
    return "may be entered by others" if status.st_mode & 0o077 else ""


# --- addresses


def fetched_from(
    place: str | Path, wanted: Wanted | None = None, *, again: bool = False
) -> Fetched | None:
    """What the address `place` came to; None where it is a path. Its server is asked once a
    process, or now with `again`; a service only for the tables that are `wanted`, or for those of
    other GPUs where it has none of this one.

    Raises:
        UsageError: when it is no address, though it begins like one, or a variable NSA_TUNE_...
            means nothing.
    """
    address = address_in(place)
    if address is None:
        return None
    # Only here: what speaks HTTP takes longer to load than a table.
    from nsa_tune.remote.fetching import fetched

    if wanted is not None:
        address = address.of_table(wanted._asdict())
    found = fetched(address, _cache_folder(), partial(_newest_in, wanted), again=again)
    if found.path is not None:
        _names[found.path] = f"{address.shown}, fetched {found.fetched_at}"
    return found


def ask_again(wanted: Wanted) -> Fetched | None:
    """Ask the server of NSA_TUNE_DB anew for what is `wanted`; None where that is no address.

    Raises:
        UsageError: as `fetched_from`.
    """
    named = os.environ.get("NSA_TUNE_DB")
    return fetched_from(named, wanted, again=True) if named else None


def local(place: Path, wanted: Wanted | None = None, *, again: bool = False) -> Path:
    """The file that stands for `place`: the copy of an address, else itself.

    Raises:
        UsageError: as `fetched_from`.
        StoreError: when it is an address of which there is no copy.
    """
    found = fetched_from(place, wanted, again=again)
    if found is None:
        return place
    if found.path is None:
        raise StoreError(found.sentence)
    return found.path


def _cache_folder() -> Path | None:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if Path(cache).is_absolute():
        return Path(cache) / "nsa-tune"
    return _expanded("~/.cache/nsa-tune")


def _newest_in(wanted: Wanted | None, path: Path) -> str:
    """When the newest of the `wanted` tables in `path`, a text table or a database, was measured
    last; "" where there is none.

    Raises:
        StoreError: when it is neither, or one of these tables cannot be read.
    """
    if path.suffix == ".tsv":
        table = read_text(path)
        return table.measured_at if wanted is not None and wanted.matches(table.key) else ""
    _check_database(path)
    tables = [] if wanted is None else read_database(path, wanted)
    return max((table.measured_at for table in tables), default="")


def _check_database(path: Path) -> None:
    with store_errors(path), closing(connect_read_only(path)) as connection:
        if schema_version(connection, path) == 0:
            raise StoreCorrupt(f"{path} is an empty database")
        with damage_errors(path):
            wanted_keys(connection)


# --- both kinds of file


def _stored(path: Path, wanted: Wanted) -> list[StoredTable]:
    check_regular_file(path)
    read = _stored_in_text if path.suffix == ".tsv" else _stored_in_database
    found = read(path, wanted)
    name = f"shipped:{path.stem}" if path.parent == _SHIPPED else _names.get(path)
    return found if name is None else [_called(name, table) for table in found]


def _stored_in_text(path: Path, wanted: Wanted) -> list[StoredTable]:
    if not wanted.matches(read_key(path)):
        return []
    table = read_text(path)
    return [StoredTable(table, lambda: table)]


def _called(name: str, table: StoredTable) -> StoredTable:
    """`table`, whose source is called `name`."""
    return table._replace(
        head=replace(table.head, source=name), read=lambda: replace(table.read(), source=name)
    )


# --- databases


def read_database(path: Path, wanted: Wanted | None = None) -> list[Table]:
    """Every table in the database `path`, or those that are `wanted`, without changing the file.

    Of several measurements of one arm on one batch the newest counts.

    Raises:
        StoreMissing: when there is no such file.
        StoreNewer: when a newer nsa-tune wrote it.
        StoreCorrupt: when it is no database of nsa-tune, or damaged.
    """
    check_regular_file(path)
    with store_errors(path), closing(connect_read_only(path)) as connection:
        connection.execute("BEGIN")  # one view of the file, whatever a tuner adds meanwhile
        if schema_version(connection, path) == 0:
            return []
        return tables_of(connection, path, wanted)


def keys_in(path: Path) -> list[Key]:
    """The keys of the tables in the database or text table `path`; no measurement is read.

    Raises:
        StoreError: when it cannot be read.
    """
    check_regular_file(path)
    if path.suffix == ".tsv":
        return [read_key(path)]
    with store_errors(path), closing(connect_read_only(path)) as connection:
        if schema_version(connection, path) == 0:
            return []
        with damage_errors(path):
            keys = wanted_keys(connection)
        return [key for number, key in keys if connection.execute(_ANY, [number]).fetchone()]


def _stored_in_database(path: Path, wanted: Wanted) -> list[StoredTable]:
    with store_errors(path), closing(connect_read_only(path)) as connection:
        connection.execute("BEGIN")
        if schema_version(connection, path) == 0:
            return []
        with damage_errors(path):
            return [
                StoredTable(
                    _head_of(connection, path, number, key, measured_at), partial(_only, path, key)
                )
                for number, key in wanted_keys(connection, wanted)
                if (measured_at := _newest_time(connection, number))
            ]


def _newest_time(connection: sqlite3.Connection, number: int) -> str:
    """When the key with this `number` was last measured under; "" where it never was."""
    (time,) = connection.execute(_NEWEST, [number]).fetchone()
    return "" if time is None else text_of(time)


def _only(path: Path, key: Key) -> Table:
    """The whole table of `key`, read again."""
    wanted = Wanted(key.gpu, key.model, key.heads, key.kv_layout)
    for table in read_database(path, wanted):
        if table.key == key:
            return table
    raise StoreMissing(f"{path} no longer has the table {key.digest}")


def tables_of(
    connection: sqlite3.Connection, path: Path, wanted: Wanted | None = None
) -> list[Table]:
    """The tables in an open database of nsa-tune, in the order in which their keys came.

    Keys without a measurement are left out.
    """
    with damage_errors(path):
        keys = wanted_keys(connection, wanted)
        tables = [table_of(connection, path, number, key) for number, key in keys]
    return [table for table in tables if table.measurements]


def table_of(connection: sqlite3.Connection, path: Path, number: int, key: Key) -> Table:
    """The newest measurements of the key with this `number` in an open database, perhaps none.

    Raises:
        ValueError: when a row is not what nsa-tune writes.
    """
    # A database that only an older version has written is read as it is.
    since = columns_since(schema_version(connection, path))
    *columns, measured_at = _newest_columns(connection, number, **since)
    newest = max(map(str, measured_at), default="")
    head = _head_of(connection, path, number, key, newest)
    check_sequences(columns[1])
    times = {
        cell: at
        for *cell_, at in zip(*columns[:3], measured_at, strict=True)
        if at != newest and (cell := tuple(cell_))
    }
    return replace(head, measurements=checked_measurements(columns), times=times)


def columns_since(version: int) -> dict[str, str]:
    """SQL for the columns that not every schema has, in one of this `version`."""
    return {
        "discarded": "discarded" if version >= _DISCARDED_SINCE else "0",
        "pass_us": "pass_us" if version >= _PASS_SINCE else "NULL",
    }


def _newest_columns(
    connection: sqlite3.Connection, number: int, discarded: str, pass_us: str
) -> list[tuple[Any, ...]]:
    """What the view `newest` has for the key with this `number`, in a third of its time, in any
    order: the fields of a measurement column by column, and when each was measured.

    `discarded` and `pass_us` are the columns with these names, or what stands for them.

    Raises:
        ValueError: when the newest of several rows cannot be told.
    """
    rows = connection.execute(
        _ROWS.format(discarded=discarded, pass_us=pass_us, id=""), [number]
    ).fetchmany(MOST_STORED + 1)
    if len(rows) > MOST_STORED:
        raise ValueError(f"more than {MOST_STORED} measurements of one key")
    columns = list(zip(*rows, strict=True)) or [()] * _WIDTH
    if len({*zip(*columns[:3], strict=True)}) == len(rows):
        if len(rows) > MOST_ROWS:
            raise ValueError(f"more than {MOST_ROWS} measurements of one key")
        return columns
    if not all(isinstance(time, str) for time in columns[-1]):
        raise ValueError("a time of measurement that is no text")
    query = _ROWS.format(discarded=discarded, pass_us=pass_us, id=", measurements.id")
    found = {
        row[:3]: row[:_WIDTH]
        for row in sorted(connection.execute(query, [number]), key=itemgetter(-2, -1))
    }
    if len(found) > MOST_ROWS:
        raise ValueError(f"more than {MOST_ROWS} measurements of one key, of which none is newer")
    return list(zip(*found.values(), strict=True))


def _head_of(
    connection: sqlite3.Connection, path: Path, number: int, key: Key, measured_at: str
) -> Table:
    """The table of the key with this `number`, without its measurements."""
    facts = connection.execute(_DEVICE, [number]).fetchone()
    if facts is None:
        raise ValueError("a key without a device")
    name, arch, *numbers = facts
    if not isinstance(name, str) or not isinstance(arch, str):
        raise ValueError("a device without a name")
    device = Device(name, arch, *map(count_of, numbers))
    return Table(key, device, (), str(path), measured_at, limits_of(connection, number))


def limits_of(connection: sqlite3.Connection, number: int) -> dict[str, int]:
    """The limits that probes found under the key with this `number`, the newest of each name.

    Raises:
        ValueError: when a row is not what nsa-tune writes.
    """
    # Schemas before 4 have no such table.
    known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'limits'").fetchone()
    found = connection.execute(_LIMITS, [number]).fetchall() if known else []
    if not all(isinstance(name, str) for name, _ in found):
        raise ValueError("a limit without a name")
    return {name: count_of(value) for name, value in found}


def wanted_keys(
    connection: sqlite3.Connection, wanted: Wanted | None = None
) -> list[tuple[int, Key]]:
    """(number, key) of each key that is `wanted`, or of all.

    Raises:
        ValueError: when a key is not what nsa-tune writes.
    """
    rows = connection.execute(_KEYS).fetchmany(MOST_KEYS + 1)
    if len(rows) > MOST_KEYS:
        raise ValueError(f"more than {MOST_KEYS} keys")
    keys = [(row[0], _key(row)) for row in rows]
    return [one for one in keys if wanted is None or wanted.matches(one[1])]


def _key(row: tuple[object, ...]) -> Key:
    _, gpu, driver, libraries, model, heads, kv_layout, protocol = row
    texts = (gpu, driver, libraries, model, kv_layout, protocol)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a key with something else than text")
    try:
        versions = json.loads(str(libraries))
    except RecursionError:
        raise ValueError("libraries nested without end") from None
    if not isinstance(versions, dict):
        raise ValueError("libraries that are no JSON object")
    pairs = tuple((name, str(version)) for name, version in versions.items())
    # JSON may hold half a character, which nothing can print.
    "".join(chain.from_iterable(pairs)).encode()
    return Key(
        str(gpu), str(driver), pairs, str(model), count_of(heads), str(kv_layout), str(protocol)
    )
