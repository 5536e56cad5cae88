"""Tables out of a database into text files, and into one what other files hold.

What many hosts have measured is merged in any order and however often: the same comes out.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from nsa_tune._errors import StoreError, StoreReadOnly, UsageError
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db.checks import read_checks
from nsa_tune.db.contents import read_contents
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import format_table


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


class Merged(NamedTuple):
    """What one file came to."""

    keys: tuple[Key, ...]
    """Of its tables."""
    added: int
    """Measurements that were new."""
    known: int
    """Measurements that were there, or that others go before."""


def merge(store: Store, path: Path) -> Merged:
    """Add to `store` what `path`, a database or a text table, holds and `store` does not.

    Of each cell the newest measurement counts, wherever it comes from, and of each limit the newest
    value. Checks are taken over.

    Raises:
        StoreError: when `path` cannot be read, or the database not written.
    """
    if path.exists() and store.path.exists() and path.samefile(store.path):
        raise StoreError(f"{path} is the database that is merged into; give other files")
    found = read_contents(path)
    added = sum(store.unite(contents, path.name) for contents in found)
    if path.suffix != ".tsv":
        stored = set(map(repr, read_checks(store.path)))
        for check in read_checks(path):
            if repr(check) not in stored:
                store.add_check(check)
    total = sum(len(contents.table.measurements) for contents in found)
    return Merged(tuple(contents.table.key for contents in found), added, total - added)
