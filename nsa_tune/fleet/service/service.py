"""The service without HTTP: its two databases, what is made of them, and threads that are bounded.

Whoever waits for one kind of work holds up no other: tables are written by one thread, checked by
two, copied by three, and the service's own database is used by eight.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from nsa_tune._errors import StoreError
from nsa_tune.db.exchange import Merged
from nsa_tune.db.store import Store
from nsa_tune.fleet.service.auth.tokens import Tokens
from nsa_tune.fleet.service.jobs.demand import Demand
from nsa_tune.fleet.service.jobs.queue import LEASE_S, Jobs
from nsa_tune.fleet.service.jobs.weights import BatchWeights
from nsa_tune.fleet.service.metrics import Metrics
from nsa_tune.fleet.service.state import State, state_path
from nsa_tune.fleet.service.tables.bodies import Bodies, Body, Make, whole
from nsa_tune.fleet.service.tables.index import Entry, Held, Index
from nsa_tune.fleet.service.tables.uploads import checked, merge

Result = TypeVar("Result")

_MOST_BODIES, _MOST_BODIES_OF_TOKEN = 64, 16
"""Large bodies that are received at once, each up to 16 MiB of a file."""
_MOST_CHECKED = 16
"""Of these, how many are checked or wait for it."""


class Busy(StoreError):
    """Too much of this kind is under way; the same may be asked in some seconds."""


class Service:
    """Open databases. `close` it at the end."""

    def __init__(self, path: Path, *, auto_approve: bool = False, lease_s: float = LEASE_S) -> None:
        """Serve the database `path`. With `auto_approve` proposed jobs are queued at once; a worker
        that is silent for `lease_s` loses its job to another."""
        self.database = path
        with ExitStack() as opened:

            def threads(count: int) -> ThreadPoolExecutor:
                pool = ThreadPoolExecutor(count)
                opened.callback(pool.shutdown, cancel_futures=True)
                return pool

            writer = self._writing = threads(1)  # SQLite takes one writer anyway
            self._checks = threads(2)  # of what holds a whole table in memory
            self._copying = threads(1)  # the whole database, which may take half a minute
            self._making = threads(2)  # small bodies
            self._in_state = threads(8)
            self._store = writer.submit(Store.open, path).result()
            opened.callback(lambda: writer.submit(self._store.close).result())
            state = self._state = opened.enter_context(State.open(state_path(path)))
            # A connection of its own: whoever is let in does not wait for a job to be read.
            self.tokens = Tokens(opened.enter_context(State.open(state_path(path))))
            self.jobs = Jobs(state, lease_s=lease_s, approve=auto_approve)
            self.jobs.resume()
            self.demand = Demand(state, self.jobs)
            self.weights = BatchWeights(state)
            self._index = Index(path)
            opened.callback(self._index.close)
            # Ahead of whoever needs all tables; until then hosts ask for theirs alone.
            self._in_state.submit(self._index.held)
            self._bodies = Bodies()
            self._receiving: Counter[str] = Counter()
            self._checking = 0
            self.metrics = Metrics()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Finish what is being written, and close the databases."""
        self._opened.close()

    async def held(self) -> Held:
        """What tables there are."""
        return await self.in_state(self._index.held)

    async def held_of(self, name: tuple[str | None, str, int, str]) -> tuple[Entry, ...]:
        """Of these the ones with this GPU (None: any), model, local heads and KV layout."""
        return await self.in_state(self._index.of, name)

    async def in_state(self, act: Callable[..., Result], *arguments: object) -> Result:
        """What `act` returns, which uses the service's own database."""
        return await _run(self._in_state, lambda: act(*arguments))

    async def check(self, act: Callable[[], Result]) -> Result:
        """What `act` returns, which holds a table or a log in memory.

        Raises:
            Busy: when many wait for that already.
        """
        if self._checking >= _MOST_CHECKED:
            raise Busy(f"{self._checking} uploads are being checked; send it again")
        self._checking += 1
        try:
            return await _run(self._checks, act)
        finally:
            self._checking -= 1

    async def copy(self) -> Body:
        """The whole database as one file."""
        version, pool = await self.in_state(self._index.version), self._copying
        make = partial(whole, self.database)
        return await self._bodies.get("whole", str(version), make, partial(_run, pool))

    async def body(self, name: str, version: str, make: Make) -> Body:
        """The small body `name`, which `make` makes if there is none of this version."""
        return await self._bodies.get(name, version, make, partial(_run, self._making))

    async def large_body(self, name: str, version: str, make: Make) -> Body:
        """The same where `make` holds a whole table in memory."""
        return await self._bodies.get(name, version, make, self.check)

    async def state_body(self, name: str, make: Callable[[], str], tables: int = 0) -> Body:
        """The body `name`, a text that `make` makes of the service's own database, and of the
        version `tables` of the other."""
        version = await self.in_state(lambda: self._state.version)
        return await self.body(
            name,
            f"{version} {tables}",
            lambda path: path.write_text(make(), "utf-8", "backslashreplace"),
        )

    @contextmanager
    def receiving(self, sender: str) -> Iterator[None]:
        """Around receiving a large body that the token `sender` sends.

        Raises:
            Busy: when too many are under way.
        """
        count = self._receiving[sender]
        if count >= _MOST_BODIES_OF_TOKEN or self._receiving.total() >= _MOST_BODIES:
            raise Busy(f"{count} uploads of token {sender} are under way; send it again")
        self._receiving[sender] += 1
        try:
            yield
        finally:
            self._receiving[sender] -= 1
            self._receiving += Counter()  # without those that are 0

    async def upload(self, path: Path) -> Merged:
        """Add the text table `path`; what it returned is on the disk.

        Raises:
            UsageError: when it is no table that can be used.
            StoreError: when it cannot be stored: nothing of it is, then.
        """
        table = await self.check(lambda: checked(path))
        merged = await _run(self._writing, lambda: merge(self._store, path, table))
        self.metrics.rows.labels("added").inc(merged.added)
        self.metrics.rows.labels("known").inc(merged.known)
        return merged

    def metrics_text(self) -> bytes:
        """What Prometheus reads.

        Raises:
            StoreError: when a database cannot be read.
        """
        held = self._index.held()
        return self.metrics.text(
            self.jobs.counts(), tables=len(held.entries), measurements=held.measurements,
            doubtful_tables=len(self.demand.doubtful()), workers=self.jobs.worker_count(),
            database_bytes=self.database.stat().st_size,
        )  # fmt: skip


async def _run(pool: ThreadPoolExecutor, act: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(pool, act)
