"""Ledger: measured rows on their way to the disk, by the database or, failing that, beside it."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from nsa_tune._errors import StoreError, StoreReadOnly
from nsa_tune.backend.types.records import Device, Key, Measurement, Table
from nsa_tune.db.exchange import write_text
from nsa_tune.db.store import Store

__all__ = ["Ledger", "flush_all"]

_log = logging.getLogger(__name__)


class Ledger:
    """The rows of one run under one key."""

    def __init__(self, store: Store, run: int, key: Key, device: Device) -> None:
        self._store = store
        self._run = run
        self._key = key
        self._device = device
        self._pending: list[Measurement] = []
        self.stored: list[Measurement] = []
        """On the disk."""

    def note(self, rows: Iterable[Measurement]) -> None:
        """Take `rows` into account; `flush` stores them."""
        self._pending.extend(rows)

    def flush(self) -> None:
        """Store what was noted, all of it or none.

        Raises:
            StoreError: when the database does not take it; the text says where it is instead.
        """
        if not self._pending:
            return
        try:
            self._store.add(self._run, self._pending)
        except StoreError as error:
            raise type(error)(f"{error}; {self._spilled()}") from error
        self.stored.extend(self._pending)
        self._pending.clear()

    def end(self, outcome: str) -> None:
        """Note how the run ended; a database that is full or locked need not know."""
        try:
            self._store.end_run(self._run, outcome)
        except StoreError as error:
            _log.warning("how the run ended is not stored: %s", error)

    def _spilled(self) -> str:
        """Write what is pending as a text table; returns the clause that says where."""
        count, now = len(self._pending), datetime.now(UTC)
        table = Table(
            self._key, self._device, tuple(self._pending), "pending",
            now.isoformat(timespec="microseconds"),
        )  # fmt: skip
        name = f"{self._store.path.stem}-pending-{now:%Y%m%dT%H%M%S}-{os.getpid()}.tsv"
        for place in (self._store.path.parent, Path(tempfile.gettempdir())):
            try:
                write_text(table, place / name)
            except StoreReadOnly as error:
                _log.info("%s", error)
                continue
            self._pending.clear()
            return (
                f"the last {count} measurements are in {place / name}: "
                f"add them later with `nsa-tune db import {place / name}`"
            )
        return f"the last {count} measurements are lost, no file could be written for them"


def flush_all(ledgers: Iterable[Ledger]) -> None:
    """Flush each of `ledgers`, also after one has failed.

    Raises:
        StoreError: as the first that failed, with what every one says.
    """
    errors = []
    for ledger in ledgers:
        try:
            ledger.flush()
        except StoreError as error:
            errors.append(error)
    if errors:
        raise type(errors[0])("; ".join(map(str, errors))) from errors[0]
