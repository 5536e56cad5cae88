"""The row writer: stores measured rows, in the database or, if it refuses them, in a text file."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from nsa_tune._errors import StoreError, StoreReadOnly
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Device, Key, Measurement, Table
from nsa_tune.db.exchange import write_text
from nsa_tune.db.store import Store, UnitOfRun

_log = logging.getLogger(__name__)


class RowWriter:
    """Writes the rows of one run under one key."""

    def __init__(self, store: Store, run: int, key: Key, device: Device) -> None:
        self._store = store
        self._run = run
        self._key = key
        self._device = device
        self._rows: list[Measurement] = []
        """All that this run has measured, the stored ones first."""
        self._stored, self._storing = 0, False
        self._units: dict[str, UnitOfRun] = {}
        """By name: units that have done something since the last `flush`."""

    @property
    def stored(self) -> list[Measurement]:
        """Rows that are in the database."""
        return self._rows[: self._stored]

    def add(self, rows: Iterable[Measurement]) -> None:
        """Take `rows` to store at the next `flush`."""
        self._rows.extend(rows)

    def note(self, unit: UnitOfRun) -> None:
        """Take what `unit` did so far, to store with the rows at the next `flush`."""
        self._units[unit.unit] = unit

    def flush(self) -> None:
        """Store the rows and the units' progress that were added, all of them or none.

        Raises:
            StoreError: when the database refuses them; the text names the file that has them.
        """
        if self._storing:
            # Ctrl-C has ended the last flush: before the database had its rows, or after.
            self._stored = self._store.rows_of_run(self._run)
        pending = self._rows[self._stored :]
        if not pending and not self._units:
            return
        self._storing = True
        try:
            self._store.add(self._run, pending, units=list(self._units.values()))
        except StoreError as error:
            # The last flush of a run must not fail again: its error would hide where the rows are.
            self._storing = False
            self._units.clear()
            if not pending:
                raise
            raise type(error)(f"{error}; {self._write_beside(pending)}") from error
        self._stored += len(pending)
        self._storing = False
        self._units.clear()

    def end(self, outcome: str) -> None:
        """Store how the run ended; logs a warning when the database refuses it."""
        try:
            self._store.end_run(self._run, outcome)
        except StoreError as error:
            _log.warning("how the run ended is not stored: %s", error)

    def _write_beside(self, pending: Sequence[Measurement]) -> str:
        """Write these rows to a text table; returns the clause that says where it is."""
        what, now = counted(len(pending), "measurement"), datetime.now(UTC)
        table = Table(
            self._key, self._device, tuple(pending), "pending",
            now.isoformat(timespec="microseconds"),
        )  # fmt: skip
        name = f"{self._store.path.stem}-pending-{now:%Y%m%dT%H%M%S}-{os.getpid()}.tsv"
        for directory in (self._store.path.parent, Path(tempfile.gettempdir())):
            path = directory / name
            try:
                write_text(table, path)
            except StoreReadOnly as error:
                _log.info("%s", error)
                continue
            del self._rows[self._stored :]
            return (
                f"what was measured last ({what}) is in {path}: "
                f"add it later with `nsa-tune db import {path}`"
            )
        return f"what was measured last ({what}) is lost: no file could be written for it"


def flush_all(writers: Iterable[RowWriter]) -> None:
    """Flush each of `writers`, also after one has failed.

    Raises:
        StoreError: of the first writer's type, with the texts of all that failed.
    """
    errors = []
    for writer in writers:
        try:
            writer.flush()
        except StoreError as error:
            errors.append(error)
    if errors:
        raise type(errors[0])("; ".join(map(str, errors))) from errors[0]
