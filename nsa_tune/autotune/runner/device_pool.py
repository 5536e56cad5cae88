"""The device pool: keeps every device of a run busy, and one thread stores what they measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from time import perf_counter

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.runner.arrivals import Arrivals
from nsa_tune.autotune.runner.first_calls import FirstCalls
from nsa_tune.autotune.runner.pooled_device import PooledDevice
from nsa_tune.autotune.runner.progress import Incident, Progress, Stored
from nsa_tune.autotune.runner.quarantine import Quarantined
from nsa_tune.autotune.runner.row_writer import flush_all
from nsa_tune.autotune.runner.sweep import Sweep, Task
from nsa_tune.autotune.worker.executor import DeviceLost, JobUpdate
from nsa_tune.backend.types.records import Measurement

_POLL_S = 0.25
"""How often the deadlines of workers that send nothing are checked."""


class DevicePool:
    """Runs the sweeps of its devices.

    Args:
        arrivals: devices that join when they are ready, and come back when they were lost.
    """

    def __init__(
        self, devices: Sequence[PooledDevice], progress: Progress, arrivals: Arrivals | None = None
    ) -> None:
        self._devices: list[PooledDevice] = []
        self._sweeps: dict[int, Sweep] = {}
        self._arrivals = arrivals
        self._progress = progress
        self._done = 0
        """Batches that are stored and reported."""
        self._failure = MachineUnfit("no device is left to measure on")
        """Why the latest device was left out."""
        self._started = perf_counter()
        self._first_calls = FirstCalls()
        self._finished: list[tuple[Task, list[Measurement]]] = []
        """Tasks that are finished, but not stored."""
        self.replaced = 0
        """Workers that were replaced."""
        self.lost = 0
        """Times that a device was lost during a job."""
        for device in devices:
            self._join(device)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return perf_counter() - self._started

    def measure(self, budget_s: float | None) -> str:
        """Measure until all is done, or until `budget_s` seconds are used up.

        Batches in progress when the budget ends are finished.

        Returns:
            "done", or "budget" when it ended the run with batches left.

        Raises:
            StoreError: when the database takes no more rows.
            MachineUnfit: when a sweep has no working device left.
        """
        try:
            spent = self._work(budget_s)
        except (MachineUnfit, KeyboardInterrupt):
            # Store and report what was finished before.
            self._store()
            raise
        left = any(sweep.left() for sweep in self._sweeps.values())
        return "budget" if spent and left else "done"

    def _work(self, budget_s: float | None) -> bool:
        """Measure until no device is busy; returns whether the budget is used up."""
        while True:
            self._take_arrivals()
            # At least one batch is measured, even with a budget of 0.
            measured = self._done + len(self._finished)
            spent = budget_s is not None and self.seconds >= budget_s and measured > 0
            for device in list(self._devices):
                if not device.busy and not spent:
                    self._attempt(self._start_next, device)
            # After the devices have their next jobs: none of them waits for the disk.
            self._store()
            busy = [device for device in self._devices if device.busy]
            if not busy and (spent or not self._stranded()):
                return spent
            if not busy and not self._arrivals:
                raise self._failure
            self._wait_for_news(busy)
            for device in busy:
                self._attempt(self._advance, device)
            self._report_first_calls()

    def _join(self, device: PooledDevice) -> None:
        self._devices.append(device)
        self._sweeps[id(device.sweep)] = device.sweep

    def _take_arrivals(self) -> None:
        """Take in the devices that have become ready."""
        if self._arrivals:
            for device in self._arrivals.poll():
                self._join(device)
            self._failure = self._arrivals.refused or self._failure

    def _stranded(self) -> list[Sweep]:
        """The sweeps that have jobs left and no device."""
        served = {id(device.sweep) for device in self._devices}
        return [sweep for key, sweep in self._sweeps.items() if key not in served and sweep.left()]

    def _wait_for_news(self, busy: Sequence[PooledDevice]) -> None:
        connections = [device.executor.connection for device in busy]
        if self._arrivals:
            connections += self._arrivals.connections
        awaited = [connection for connection in connections if connection is not None]
        if len(awaited) == len(connections):
            wait(awaited, _POLL_S)

    def _start_next(self, device: PooledDevice) -> None:
        if device.sweep.hand_out_ceilings():
            device.at_ceilings = True
            device.executor.begin_ceilings()
            return
        device.task = device.sweep.next(device.unit)
        if device.task is not None:
            device.executor.begin(device.task.to_measure)

    def _advance(self, device: PooledDevice) -> None:
        update, task = device.executor.advance(), device.task
        if update is None:
            return
        if task is None:
            self._take_ceilings(device, update)
            return
        quarantined = device.sweep.take(device.unit, task, update.rows, update.killed_by)
        self._report(device.unit, task, update, quarantined)
        if update.finished:
            rows = device.sweep.finished(device.unit, task)
            device.task = None
            if not task.repeated:
                self._finished.append((task, rows))

    def _report_first_calls(self) -> None:
        for device in self._devices:
            incident = self._first_calls.look(device, alone=len(self._devices) == 1)
            if incident is not None:
                self._progress.incident(incident)

    def _take_ceilings(self, device: PooledDevice, update: JobUpdate) -> None:
        device.at_ceilings = False
        if update.replaced:
            self._report_replaced(device.unit, "measuring the ceilings", update.replaced)
        device.sweep.writer.add(update.rows)

    def _report(self, unit: str, task: Task, update: JobUpdate, out: Sequence[Quarantined]) -> None:
        if update.replaced:
            arms = ", ".join(row.arm for row in update.rows)
            self._report_replaced(unit, f"{arms} on {task.job.batch}", update.replaced)
        for arm in out:
            text = f"{arm.arm} of {arm.point} is quarantined: not tried again without --fresh"
            self._progress.incident(Incident("quarantined", text))

    def _report_replaced(self, unit: str, after: str, reason: str) -> None:
        self.replaced += 1
        text = f"the worker on {unit} is replaced after {after}: {reason}"
        self._progress.incident(Incident("worker_replaced", text))

    def _store(self) -> None:
        """Store the rows of all devices, then report the batches that are finished."""
        flush_all(sweep.writer for sweep in self._sweeps.values())
        finished, self._finished = self._finished, []
        in_progress = sum(d.task is not None and not d.task.repeated for d in self._devices)
        left = sum(sweep.left() for sweep in self._sweeps.values())
        total = self._done + len(finished) + in_progress + left
        for task, rows in finished:
            self._done += 1
            point, batch = task.job.point, task.job.batch
            self._progress.batch(Stored(self._done, total, point, batch, rows, self.seconds))

    def _attempt(self, act: Callable[[PooledDevice], None], device: PooledDevice) -> None:
        """Call `act` on `device`. If the device is lost or fails for good, its work goes to the
        others.

        Raises:
            MachineUnfit: when there is no other device, and none can come.
        """
        try:
            act(device)
        except DeviceLost as loss:
            self._lose(device, str(loss))
        except MachineUnfit as error:
            self._devices.remove(device)
            device.give_back()
            # A worker that hangs in the driver cannot be ended.
            with suppress(MachineUnfit):
                device.executor.close()
            if not self._devices and not self._arrivals:
                raise
            self._failure = error
            text = f"{device.unit} is left out: {error}"
            self._progress.incident(Incident("unit_dropped", text))

    def _lose(self, device: PooledDevice, reason: str) -> None:
        """The device may come back; meanwhile others do its work."""
        assert self._arrivals is not None, "only a launcher's devices are ever lost"
        self.lost += 1
        self._devices.remove(device)
        device.give_back()
        self._arrivals.add(device.executor)
        text = f"{device.unit} is lost, and what it was measuring is measured again: {reason}"
        self._progress.incident(Incident("unit_lost", text))
