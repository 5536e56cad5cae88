"""Selection of the tables for a report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nsa_tune._errors import NoTunedData, StoreError
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db import places
from nsa_tune.db.reader import keys_in, tables_in

_log = logging.getLogger(__name__)
_MOST_NAMED = 4
"""Tables or values that a message names."""


@dataclass(frozen=True, slots=True)
class TableFilter:
    """Values that a table's key must have; None accepts any."""

    gpu: str | None = None
    model: str | None = None
    heads: int | None = None
    """Local heads."""
    kv_layout: str | None = None

    def matches(self, key: Key) -> bool:
        """Whether `key` has every value that is asked for."""
        return all(value == getattr(key, name) for name, value in self.asked())

    def asked(self) -> list[tuple[str, str | int]]:
        """(field of the key, its value) of everything that is asked for."""
        return [(name, value) for name, value in asdict(self).items() if value is not None]

    def __str__(self) -> str:
        """What is asked for, as text for messages."""
        return ", ".join(f"{name} {value!r}" for name, value in self.asked()) or "anything"


def select_tables(db: Path | None, wanted: TableFilter) -> list[Table]:
    """The tables that match `wanted`, newest first, from the first source that has any.

    Sources are searched in the order of `places.sources`; the shipped tables are one source.

    Raises:
        NoTunedData: when no source has one; the message says what there is instead.
        StoreError: when `db` is given and cannot be read.
    """
    known: dict[Key, None] = {}
    for paths in places.grouped_sources(db):
        found: list[Table] = []
        for path in paths:
            try:
                known |= dict.fromkeys(keys_in(path))
                name = places.name_of(path) or str(path)
                found += (replace(table, source=name) for table in tables_in(path, wanted))
            except StoreError as error:
                if path == db:
                    raise
                _log.warning("%s is skipped: %s", path, error)
        if found:
            return sorted(found, key=lambda table: table.measured_at, reverse=True)
    if not known:
        raise NoTunedData(
            "nothing is measured yet, and no table ships; measure with `nsa-tune run`"
        )
    others = "; ".join(_others(wanted, list(known)))
    raise NoTunedData(f"nothing is measured for {wanted}; {others}")


def _others(wanted: TableFilter, known: list[Key]) -> Iterator[str]:
    """For each asked value that no table has, those that there are; else the nearest tables."""
    absent = [
        name for name, value in wanted.asked() if all(getattr(key, name) != value for key in known)
    ]
    for name in absent:
        values = sorted({getattr(key, name) for key in known})
        yield f"{name} may be {_listed(map(repr, values))}"
    if not absent:
        asked = wanted.asked()
        far = {key: sum(getattr(key, name) != value for name, value in asked) for key in known}
        yield f"the nearest tables: {_listed(map(_named, sorted(far, key=far.__getitem__)))}"


def _named(key: Key) -> str:
    return f"{key.gpu!r} {key.model} {key.heads} heads {key.kv_layout}"


def _listed(words: Iterable[str]) -> str:
    """The first of `words`, each once, and how many more there are."""
    every = list(dict.fromkeys(words))
    more = len(every) - _MOST_NAMED
    rest = [f"and {more} more"] if more > 0 else []
    return ", ".join(every[:_MOST_NAMED] + rest)
