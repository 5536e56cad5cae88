"""The service without HTTP: its two databases, what is made of them, and one writer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from starlette.concurrency import run_in_threadpool

from nsa_tune.backend.types.records import Key
from nsa_tune.db.store import Store
from nsa_tune.fleet.service.auth.tokens import Tokens
from nsa_tune.fleet.service.jobs.demand import Demand
from nsa_tune.fleet.service.jobs.queue import LEASE_S, Jobs
from nsa_tune.fleet.service.jobs.weights import BatchWeights
from nsa_tune.fleet.service.metrics import Holdings, Metrics
from nsa_tune.fleet.service.state import State, state_path
from nsa_tune.fleet.service.tables.copies import Copy, Current, TextTable, TextTables, copy_of
from nsa_tune.fleet.service.tables.holdings import Held, held_in
from nsa_tune.fleet.service.tables.uploads import Merged, checked, merge, received

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Settings:
    """What whoever starts a service decides."""

    database: Path
    auto_approve: bool = False
    """Queue proposed jobs at once."""
    lease_s: float = LEASE_S
    """How long a worker may be silent before its job goes to another."""


class Service:
    """Open databases. `close` it at the end."""

    def __init__(self, settings: Settings) -> None:
        path = settings.database
        self.database = path
        with ExitStack() as opened:
            # All writes of tables come from one thread: SQLite takes one writer anyway.
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
            opened.callback(self._writer.shutdown)
            self._store = self._writer.submit(Store.open, path).result()
            opened.callback(lambda: self._writer.submit(self._store.close).result())
            state = opened.enter_context(State.open(state_path(path)))
            # A connection of its own: whoever is let in does not wait for a job to be written.
            self.tokens = Tokens(opened.enter_context(State.open(state_path(path))))
            self.jobs = Jobs(state, lease_s=settings.lease_s, approve=settings.auto_approve)
            self.jobs.resume()
            self.demand = Demand(state, self.jobs)
            self.weights = BatchWeights(state)
            self.copy: Current[Copy] = Current(path, lambda: copy_of(path))
            self.texts: Current[list[TextTable]] = Current(path, TextTables(path).all)
            self.held: Current[Held] = Current(path, lambda: held_in(path))
            for current in (self.copy, self.texts, self.held):
                opened.callback(current.close)
            self.metrics = Metrics(self._holdings)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Finish what is being written, and close the databases."""
        self._opened.close()

    async def keys(self) -> tuple[Key, ...]:
        """Of all tables in which something succeeded."""
        return (await self.held.get()).keys

    async def upload(self, body: bytes, sender: str) -> Merged:
        """Add the text table `body`; what it returned is on the disk.

        Raises:
            UsageError: when it is no table that can be used.
            StoreError: when it cannot be stored.
        """
        with received(body, sender) as path:
            table = await run_in_threadpool(checked, path)
            merged = await self._write(lambda: merge(self._store, path, table))
        self.metrics.rows.labels("added").inc(merged.added)
        self.metrics.rows.labels("known").inc(merged.known)
        return merged

    async def _write(self, act: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._writer, act)

    def _holdings(self) -> Holdings:
        held = held_in(self.database)
        return Holdings(
            self.jobs.counts(), len(held.keys), held.measurements, len(self.demand.doubtful()),
            len(self.jobs.workers()), self.database.stat().st_size,
        )  # fmt: skip
