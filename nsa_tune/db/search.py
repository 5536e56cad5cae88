"""Finding the tables of one GPU, model, head count and KV layout, wherever they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from nsa_tune._errors import StoreError, StoreMissing
from nsa_tune.backend.types.records import Status, StoredTable, Table
from nsa_tune.db.places import grouped_sources, name_of
from nsa_tune.db.reader import Wanted, stored_in

_log = logging.getLogger(__name__)


def find(
    db: Path | None, wanted: Wanted, asked: Wanted | None = None
) -> Iterator[list[StoredTable]]:
    """The tables that are `wanted`, newest first, from one source after the other that has any.

    The shipped tables together are one source. A source that cannot be read is skipped, with a
    warning if it is there. Whether a measurement succeeded is not asked. With `asked`, a service's
    answer for that is searched.

    Raises:
        StoreError: when `db` is given and cannot be read.
    """
    for places in grouped_sources(db, asked or wanted):
        tables = [table for path in places for table in _stored(path, wanted, path == db)]
        if tables:
            yield sorted(tables, key=lambda table: table.head.measured_at, reverse=True)


def succeeded(table: Table) -> bool:
    """Whether any measurement of `table` did."""
    return any(row.status is Status.OK for row in table.measurements)


def _stored(path: Path, wanted: Wanted, named: bool) -> list[StoredTable]:
    try:
        tables = stored_in(path, wanted)
    except StoreError as error:
        if named:
            raise
        # That NSA_TUNE_DB is missing, `warn_of_missing_files` says once.
        if not isinstance(error, StoreMissing):
            _log.warning("%s is skipped: %s", path, error)
        return []
    name = name_of(path)
    return tables if name is None else [_called(name, table) for table in tables]


def _called(name: str, table: StoredTable) -> StoredTable:
    """`table`, whose source is called `name`."""
    return table._replace(
        head=replace(table.head, source=name), read=lambda: replace(table.read(), source=name)
    )
