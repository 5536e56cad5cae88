"""Uploaded tables: checked before anything of them is stored, then merged."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

from nsa_tune._errors import NsaTuneError, UsageError
from nsa_tune.backend.dispatch.fit_check import check_fit
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Table
from nsa_tune.db.connection import connect_read_only, store_errors
from nsa_tune.db.exchange import Merged, import_text
from nsa_tune.db.reader import MOST_KEYS, MOST_STORED
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import MOST_ROWS, read_text

MOST_BYTES = 2**24
"""Of an uploaded table or log."""
_STORED = (
    "SELECT count(*) FROM measurements JOIN runs ON runs.id = run_id "
    "JOIN keys ON keys.id = key_id WHERE digest = ?"
)
_AHEAD = timedelta(hours=1)
"""How far a host's clock may be ahead."""
_LONGEST_NAME = 400


def checked(path: Path, now: datetime | None = None) -> Table:
    """The uploaded table in `path`, if a database that holds it too can still be used by everybody.

    Raises:
        UsageError: when it is no such table; says what is wrong, without naming the file.
    """
    try:
        table = read_text(path)
        _check_key(table)
        _check_time(table.measured_at, now or datetime.now(UTC))
        for row in table.measurements:
            # Rooflines are no batches; of points to come this version knows nothing.
            if row.point in POINTS:
                Batch.parse(row.batch)
        check_fit(table)
    except NsaTuneError as error:
        raise UsageError(str(error).replace(str(path), "the table")) from error
    return table


def _check_key(table: Table) -> None:
    key = table.key
    profile = profile_of(key.model)
    profile.check_heads(key.heads)
    texts = (key.gpu, key.driver, key.kv_layout, key.protocol, table.device.arch)
    libraries = [word for pair in key.libraries for word in pair]
    if not all(text.isprintable() and len(text) <= _LONGEST_NAME for text in (*texts, *libraries)):
        raise UsageError("the key of the table has a text that is long, or cannot be printed")
    if not key.gpu or not key.protocol:
        raise UsageError("the key of the table names no GPU, or no timing protocol")


def _check_time(measured_at: str, now: datetime) -> None:
    """The newest rows count, and times are compared as texts: a time to come would win for ever."""
    try:
        time = datetime.fromisoformat(measured_at)
    except ValueError:
        time = None
    if time is None or time.utcoffset() is None or _canonical(time) != measured_at:
        raise UsageError(f"measured_at is {measured_at!r}, not like {_canonical(now)}")
    if time > now + _AHEAD:
        raise UsageError(f"measured_at is {measured_at}, which is to come; set the host's clock")


def _canonical(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="microseconds")


def merge(store: Store, path: Path, table: Table) -> Merged:
    """Add what `store` lacks of `table`, which `path` holds.

    Raises:
        UsageError: when it holds too much, or readers would refuse the database afterwards.
        StoreError: when it cannot be written.
    """
    _check_room(store, table)
    added = import_text(store, path)
    return Merged((table.key,), added, len(table.measurements) - added)


def _check_room(store: Store, table: Table) -> None:
    with store_errors(store.path), closing(connect_read_only(store.path)) as connection:
        (keys,) = connection.execute("SELECT count(*) FROM keys").fetchone()
        (stored,) = connection.execute(_STORED, [table.key.digest]).fetchone()
    if not stored and keys >= MOST_KEYS:
        raise UsageError(f"the service holds {keys} tables, and takes no more")
    if stored + len(table.measurements) > MOST_STORED:
        raise UsageError(
            f"the service holds {stored} measurements of this key, and takes no more; start a new "
            "database for newer ones"
        )
    if not stored:
        return
    rows = (*store.table(table.key).measurements, *table.measurements)
    if len({(row.point, row.batch, row.arm) for row in rows}) > MOST_ROWS:
        raise UsageError(f"the table would have more than {MOST_ROWS} rows with those known here")
