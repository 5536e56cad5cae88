"""The sweeps of a run: one for each key that its devices have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from nsa_tune.autotune.bench.registry import points_in
from nsa_tune.autotune.runner.pooled_device import PooledDevice
from nsa_tune.autotune.runner.progress import Progress
from nsa_tune.autotune.runner.sweep import Sweep
from nsa_tune.autotune.search.schedule import MakeSchedule
from nsa_tune.autotune.worker.executor import Executor
from nsa_tune.autotune.worker.messages import Ready, Setup
from nsa_tune.backend.types.records import Key
from nsa_tune.db.store import Store


class Sweeps(AbstractContextManager["Sweeps"]):
    """Opens the database and makes a sweep when the first device of a key is ready."""

    def __init__(
        self, database: Path, setup: Setup, arguments: Mapping[str, object],
        make_schedule: MakeSchedule, progress: Progress,
    ) -> None:  # fmt: skip
        self._database = database
        self._setup = setup
        self._arguments = arguments
        self._make_schedule = make_schedule
        self._progress = progress
        self._by_key: dict[Key, Sweep] = {}
        self._units: dict[str, Executor] = {}
        self._opened = ExitStack()
        self._store: Store | None = None

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def __iter__(self) -> Iterator[Sweep]:
        return iter(self._by_key.values())

    @property
    def store(self) -> Store:
        """The database. It is opened only when something is to be stored in it."""
        if self._store is None:
            self._store = self._opened.enter_context(Store.open(self._database))
        return self._store

    def admit(self, executor: Executor, ready: Ready) -> PooledDevice:
        """Give a device that is ready a place in the sweep of its key.

        Raises:
            StoreError: when the database cannot be used.
            UsageError: when the model has no such point.
        """
        ready = replace(ready, unit=self._name(executor, ready.unit))
        sweep = self._by_key.get(ready.key)
        if sweep is None:
            points = points_in(self._setup.registry, self._setup.points, ready.setting.profile)
            sweep = Sweep(ready, points, self.store, self._arguments, self._make_schedule)
            self._by_key[ready.key] = sweep
            self._progress.start(sweep.setting, ready.key, sweep.left(), sweep.skipped)
        else:
            sweep.join(ready.unit, ready.node)
        return PooledDevice(executor, sweep, ready.unit)

    def _name(self, executor: Executor, unit: str) -> str:
        """`unit`, with a number when another executor has the same one."""
        name, number = unit, 0
        while self._units.setdefault(name, executor) is not executor:
            number += 1
            name = f"{unit}/{number}"
        return name
