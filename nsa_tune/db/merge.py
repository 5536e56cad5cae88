"""Merging what many hosts have measured: in any order and however often, the same comes out."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nsa_tune._errors import StoreError
from nsa_tune.backend.types.records import Key
from nsa_tune.db.checks import read_checks
from nsa_tune.db.history import read_histories
from nsa_tune.db.store import Store


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
