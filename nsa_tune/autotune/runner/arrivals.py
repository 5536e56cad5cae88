"""Arrivals: executors whose device is not ready to measure yet, or no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import TypeAlias

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.runner.pooled_device import PooledDevice
from nsa_tune.autotune.runner.progress import Incident, Progress
from nsa_tune.autotune.worker.executor import Executor, wait_until_ready
from nsa_tune.autotune.worker.messages import Ready

TELL_AFTER_S = 20.0
"""When a run that has no device yet says so: a busy cluster may have no room for a while."""
_POLL_S = 0.25
Admit: TypeAlias = Callable[[Executor, Ready], PooledDevice]
"""Gives a device that is ready a place in the sweep of its key."""


class Arrivals:
    """Asks executors whether their device is ready, and leaves out those that cannot measure."""

    def __init__(self, executors: Sequence[Executor], admit: Admit, progress: Progress) -> None:
        self._executors = list(executors)
        self._admit = admit
        self._progress = progress
        self._admitted = 0
        self.refused: MachineUnfit | None = None
        """Why the latest of the executors that cannot measure was left out."""

    def __len__(self) -> int:
        return len(self._executors)

    @property
    def connections(self) -> list[Connection | None]:
        """Those that become readable when `poll` has something to do."""
        return [executor.connection for executor in self._executors]

    def add(self, executor: Executor) -> None:
        """The device of `executor` is lost, and may come back."""
        self._executors.append(executor)

    def gather(self, *, everyone: bool) -> list[PooledDevice]:
        """Wait until all devices are ready, or only until one is; returns those that are.

        Raises:
            MachineUnfit: when none can measure.
            NsaTuneError: when what is to be measured does not exist.
        """
        arrived: list[PooledDevice] = []
        if everyone:
            for executor in list(self._executors):
                arrived += self._ask(executor, partial(wait_until_ready, executor))
        patient_until = monotonic() + TELL_AFTER_S
        while not arrived and self._executors:
            if monotonic() >= patient_until:
                self._report_waiting()
                patient_until = inf
            awaited = [connection for connection in self.connections if connection is not None]
            wait(awaited, _POLL_S)
            arrived = self.poll()
        if not arrived:
            raise self.refused or MachineUnfit("there is no device to measure on")
        return arrived

    def _report_waiting(self) -> None:
        names = [executor.name for executor in self._executors]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"no device is ready yet: waiting for {names[0]}{more}"
        self._progress.incident(Incident("waiting", text))

    def poll(self) -> list[PooledDevice]:
        """The devices that have become ready.

        Raises:
            NsaTuneError: when what is to be measured does not exist.
        """
        return [
            device
            for executor in list(self._executors)
            for device in self._ask(executor, executor.arrival)
        ]

    def _ask(self, executor: Executor, ask: Callable[[], Ready | None]) -> list[PooledDevice]:
        try:
            ready = ask()
        except MachineUnfit as error:
            self._executors.remove(executor)
            self.refused = error
            if self._executors or self._admitted:
                text = f"{executor.name} is left out: {error}"
                self._progress.incident(Incident("unit_dropped", text))
            return []
        if ready is None:
            return []
        self._executors.remove(executor)
        self._admitted += 1
        self._report_other_processes(ready)
        return [self._admit(executor, ready)]

    def _report_other_processes(self, ready: Ready) -> None:
        if ready.others:
            processes = ", ".join(map(str, ready.others))
            text = (
                f"other processes compute on {ready.unit} and may slow it down: process {processes}"
            )
            self._progress.incident(Incident("others_compute", text))
