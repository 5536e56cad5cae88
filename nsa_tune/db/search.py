"""Finding the tables of one GPU, model, head count and KV layout, wherever they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from nsa_tune._errors import StoreError, StoreMissing
from nsa_tune.backend.types.records import Status, StoredTable, Table
from nsa_tune.db.places import grouped_sources, name_of
from nsa_tune.db.reader import Wanted, stored_in

_log = logging.getLogger(__name__)
_Read = TypeVar("_Read")


def find(db: Path | None, *, gpu: str, model: str, heads: int, kv_layout: str) -> list[Table]:
    """Tables with these four fields from the first source that has any, newest first.

    The shipped tables together are one source. A table in which nothing succeeded is passed over,
    and a source that cannot be read is skipped, with a warning if it is there.

    Raises:
        StoreError: when `db` is given and cannot be read.
    """
    for stored in find_stored(db, Wanted(gpu, model, heads, kv_layout)):
        named = str(db)
        tables = [_readable(read, head.source, head.source == named) for head, read in stored]
        usable = [table for table in tables if table is not None and succeeded(table)]
        if usable:
            return usable
    return []


def find_stored(
    db: Path | None, wanted: Wanted, asked: Wanted | None = None
) -> Iterator[list[StoredTable]]:
    """As `find`, from one source after the other; only sources that have any. Whether a
    measurement succeeded is not asked. With `asked`, a service's answer for that is searched."""
    for places in grouped_sources(db, asked or wanted):
        tables = [table for path in places for table in _stored(path, wanted, path == db)]
        if tables:
            yield sorted(tables, key=lambda table: table.head.measured_at, reverse=True)


def succeeded(table: Table) -> bool:
    """Whether any measurement of `table` did."""
    return any(row.status is Status.OK for row in table.measurements)


def _stored(path: Path, wanted: Wanted, named: bool) -> list[StoredTable]:
    tables = _readable(lambda: stored_in(path, wanted), path, named) or []
    name = name_of(path)
    return tables if name is None else [_called(name, table) for table in tables]


def _readable(read: Callable[[], _Read], source: object, named: bool) -> _Read | None:
    """What `read` gives; None, with a warning, where it cannot and the source was not named."""
    try:
        return read()
    except StoreError as error:
        if named:
            raise
        # That NSA_TUNE_DB is missing, `warn_of_missing_files` says once.
        if not isinstance(error, StoreMissing):
            _log.warning("%s is skipped: %s", source, error)
        return None


def _called(name: str, table: StoredTable) -> StoredTable:
    """`table`, whose source is called `name`."""
    return table._replace(
        head=replace(table.head, source=name), read=lambda: replace(table.read(), source=name)
    )
