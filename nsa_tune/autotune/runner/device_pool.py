"""The device pool: keeps every device of a run busy, and one thread stores what they measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from time import perf_counter

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.bench.ceilings import POINT as CEILINGS
from nsa_tune.autotune.runner.progress import Incident, Progress
from nsa_tune.autotune.runner.quarantine import Quarantined
from nsa_tune.autotune.runner.row_writer import flush_all
from nsa_tune.autotune.runner.sweep import Sweep, Task
from nsa_tune.autotune.worker.executor import Executor, JobUpdate
from nsa_tune.backend.types.records import Measurement

__all__ = ["DevicePool", "PooledDevice"]

_POLL_S = 0.25
"""How often the deadlines of workers that send nothing are checked."""


@dataclass(slots=True)
class PooledDevice:
    """One device of the pool, with the sweep that it measures for."""

    executor: Executor
    sweep: Sweep
    unit: str
    task: Task | None = None
    at_ceilings: bool = False
    """Whether it measures the roofline ceilings."""

    @property
    def busy(self) -> bool:
        """Whether it measures something."""
        return self.at_ceilings or self.task is not None


class DevicePool:
    """Runs the sweeps of its devices."""

    def __init__(self, devices: Sequence[PooledDevice], progress: Progress) -> None:
        self._devices = list(devices)
        self._sweeps = list({id(device.sweep): device.sweep for device in devices}.values())
        self._progress = progress
        self._done = 0
        """Batches that are stored and reported."""
        self._started = perf_counter()
        self._finished: list[tuple[Task, list[Measurement]]] = []
        """Tasks that are finished, but not stored."""
        self.replaced = 0
        """Workers that were replaced."""

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
        return "budget" if spent and any(sweep.left() for sweep in self._sweeps) else "done"

    def _work(self, budget_s: float | None) -> bool:
        """Measure until no device is busy; returns whether the budget is used up."""
        while True:
            # At least one batch is measured, even with a budget of 0.
            measured = self._done + len(self._finished)
            spent = budget_s is not None and self.seconds >= budget_s and measured > 0
            for device in list(self._devices):
                if not device.busy and not spent:
                    self._attempt(self._start_next, device)
            # After the devices have their next jobs: none of them waits for the disk.
            self._store()
            busy = [device for device in self._devices if device.busy]
            if not busy:
                return spent
            self._wait_for_news(busy)
            for device in busy:
                self._attempt(self._advance, device)

    def _wait_for_news(self, busy: Sequence[PooledDevice]) -> None:
        connections = [device.executor.connection for device in busy]
        awaited = [connection for connection in connections if connection is not None]
        if len(awaited) == len(busy):
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
        quarantined = device.sweep.take(device.unit, task, update.rows)
        self._report(device, task, update, quarantined)
        if update.finished:
            rows = device.sweep.finished(device.unit, task)
            device.task = None
            if not task.repeated:
                self._finished.append((task, rows))

    def _take_ceilings(self, device: PooledDevice, update: JobUpdate) -> None:
        device.at_ceilings = False
        if update.replaced:
            facts = {"point": CEILINGS}
            self._report_replaced(device, "measuring the ceilings", update.replaced, facts)
        device.sweep.writer.add(update.rows)

    def _report(
        self, device: PooledDevice, task: Task, update: JobUpdate,
        quarantined: Sequence[Quarantined],
    ) -> None:  # fmt: skip
        batch = str(task.job.batch)
        if update.replaced:
            arms = ", ".join(row.arm for row in update.rows)
            facts = {"point": task.job.point.name, "batch": batch, "arms": arms}
            self._report_replaced(device, f"{arms} on {batch}", update.replaced, facts)
        for arm in quarantined:
            text = f"{arm.arm} of {arm.point} is quarantined: not tried again without --fresh"
            self._progress.incident(Incident("quarantined", text, asdict(arm)))

    def _report_replaced(
        self, device: PooledDevice, after: str, reason: str, facts: Mapping[str, object]
    ) -> None:
        self.replaced += 1
        text = f"the worker is replaced after {after}: {reason}"
        facts = {"unit": device.unit, **facts, "reason": reason}
        self._progress.incident(Incident("worker_replaced", text, facts))

    def _store(self) -> None:
        """Store the rows of all devices, then report the batches that are finished."""
        flush_all(sweep.writer for sweep in self._sweeps)
        finished, self._finished = self._finished, []
        in_progress = sum(d.task is not None and not d.task.repeated for d in self._devices)
        left = sum(sweep.left() for sweep in self._sweeps)
        total = self._done + len(finished) + in_progress + left
        for task, rows in finished:
            self._done += 1
            self._progress.batch(
                self._done, total, task.job.point, task.job.batch, rows, self.seconds
            )

    def _attempt(self, act: Callable[[PooledDevice], None], device: PooledDevice) -> None:
        """Call `act` on `device`. If the device fails for good, its work goes to the others.

        Raises:
            MachineUnfit: when its sweep has no other device.
        """
        try:
            act(device)
        except MachineUnfit as error:
            self._devices.remove(device)
            if device.task is not None:
                device.sweep.give_back(device.unit, device.task)
            if device.at_ceilings:
                device.sweep.give_back_ceilings()
            # A worker that hangs in the driver cannot be ended.
            with suppress(MachineUnfit):
                device.executor.close()
            if not any(other.sweep is device.sweep for other in self._devices):
                raise
            text, facts = f"{device.unit} is left out: {error}", {"unit": device.unit}
            self._progress.incident(Incident("unit_dropped", text, facts))
