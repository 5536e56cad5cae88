"""Tables out of a database into text files, and into one what other files hold.

What many hosts have measured is merged in any order and however often: the same comes out.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from nsa_tune._errors import NoTunedData, StoreError, StoreReadOnly, UsageError
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db.checks import read_checks
from nsa_tune.db.history import history_of, read_histories
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import format_row, format_table, read_text


def write_text(table: Table, path: Path) -> None:
    """Write `table` to `path`, whole or not at all; floats keep 4 significant digits.

    Raises:
        UsageError: when `path` has no name.
        StoreReadOnly: when the file cannot be written.
    """
    if not path.name:
        raise UsageError(f"{str(path)!r} names no file to write the table to")
    # Of its own: two that write the same file must not take each other's draft.
    draft = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        draft.write_text(format_table(table), encoding="utf-8", newline="\n")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise StoreReadOnly(f"{path} cannot be written: {error.strerror}") from error


def import_text(store: Store, path: Path) -> int:
    """As `merge`, without rows that are in `store` with the same rounded values: a text table that
    came from it may have lost the times of its rows. How many are new.

    Raises:
        StoreError: when the file cannot be read, or the database not written.
    """
    table = read_text(path)
    try:
        known = {format_row(measurement) for measurement in store.table(table.key).measurements}
    except NoTunedData:
        known = set()
    new = tuple(row for row in table.measurements if format_row(row) not in known)
    if not new and not table.limits:
        return 0
    return store.unite(history_of(replace(table, measurements=new), {"import": path.name}))


class Merged(NamedTuple):
    """What one file came to."""

    keys: tuple[Key, ...]
    """Of its tables."""
    added: int
    """Measurements that were new."""
    known: int
    """Measurements that were there, or that others of the same time go before."""


def merge(store: Store, path: Path) -> Merged:
    """Add to `store` what `path`, a database or a text table, holds and `store` does not.

    Of each cell the newest measurement counts, wherever it comes from, and of each limit the newest
    value. Checks are taken over.

    Raises:
        StoreError: when `path` cannot be read, or the database not written.
    """
    if path.exists() and store.path.exists() and path.samefile(store.path):
        raise StoreError(f"{path} is the database that is merged into; give other files")
    histories = read_histories(path)
    added = sum(map(store.unite, histories))
    if path.suffix != ".tsv":
        stored = set(map(repr, read_checks(store.path)))
        for check in read_checks(path):
            if repr(check) not in stored:
                store.add_check(check)
    total = sum(len(run.rows) for history in histories for run in history.runs)
    return Merged(tuple(history.key for history in histories), added, total - added)
