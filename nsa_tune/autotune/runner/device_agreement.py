"""Whether several GPUs of one model agree: every one of them times the sweep's first batches.

A "unit" is one of several devices of the same model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from nsa_tune.autotune.bench.job import Job
from nsa_tune.backend.types.records import Measurement
from nsa_tune.db.store import UnitOfRun

OUT_OF_LINE = 0.03
"""Healthy GPUs of one model are within 1 % of each other. Beyond this, one has a problem."""
SHARED_BY_A_SAMPLE = 20
"""Batches that every unit of a sample measures: they speak for the units that are not in it."""
_SHARED_JOBS = 5
"""Batches that every unit measures otherwise."""
_Cell: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class DeviceReport(UnitOfRun):
    """What one unit did in a run, as it is reported."""

    device: str
    """Name of its model."""

    @property
    def out_of_line(self) -> bool:
        """Whether it is so much faster or slower that its rows do not fit the others'."""
        return self.ratio is not None and abs(self.ratio - 1) > OUT_OF_LINE


@dataclass(frozen=True, slots=True)
class Spread:
    """How far the units of one key are apart: slowest over fastest, minus one."""

    device: str
    """Name of their model."""
    driver: str
    units: int
    batches: int
    """That several of them measured."""
    median: float
    """Over those batches and their arms."""
    most: float


class DeviceAgreement:
    """Has every unit measure the first few jobs of a sweep, and compares their times.

    Only the rows of the unit that got a job first are stored.
    """

    def __init__(self, units: Sequence[str], shared_jobs: int = _SHARED_JOBS) -> None:
        self._shared_jobs = shared_jobs
        self._owed: dict[str, deque[Job]] = {unit: deque() for unit in units}
        self._times: dict[_Cell, dict[str, float]] = {}
        """By unit, what each cell took."""
        self._compared: dict[_Cell, dict[str, float]] = {}
        """The same, of cells that several units measured."""
        self._ratios: dict[str, float | None] = {}
        """What `ratio` has returned since `_compared` changed."""
        self._shared: list[Job] = []

    def join(self, unit: str) -> None:
        """`unit` has come later: it owes all shared jobs."""
        self._owed[unit] = deque(self._shared)

    def handed_out(self, job: Job, unit: str) -> None:
        """`unit` got `job`. If it is one of the first jobs, the other units owe it too."""
        if len(self._shared) == self._shared_jobs or len(self._owed) == 1:
            return
        self._shared.append(job)
        for other, owed in self._owed.items():
            if other != unit:
                owed.append(job)

    def owed_by(self, unit: str) -> Job | None:
        """The next shared job that `unit` has not measured; it then no longer owes it."""
        return self._owed[unit].popleft() if self._owed[unit] else None

    def note(self, unit: str, rows: Iterable[Measurement]) -> None:
        """Take the times of `unit`, of shared jobs and of others."""
        for row in rows:
            if row.latency_us is None:
                continue
            cell = row.point, row.batch, row.arm
            times = self._times.setdefault(cell, {})
            times[unit] = row.latency_us
            if len(times) > 1:
                self._compared[cell] = times
                self._ratios.clear()

    def ratio(self, unit: str) -> float | None:
        """Time of `unit` over the usual time, as the median over what others measured too.

        The usual time is the median of all units; of two units it is the other one's.
        """
        if unit not in self._ratios:
            self._ratios[unit] = self._new_ratio(unit)
        return self._ratios[unit]

    def _new_ratio(self, unit: str) -> float | None:
        ratios = []
        for times in self._compared.values():
            if unit in times:
                others = [time for other, time in times.items() if other != unit]
                usual = median(others if len(others) == 1 else times.values())
                ratios.append(times[unit] / usual)
        return median(ratios) if ratios else None

    def spread(self, device: str, driver: str) -> Spread | None:
        """How far the units are apart; None when no batch was measured by two of them."""
        if not self._compared:
            return None
        apart = [max(times.values()) / min(times.values()) - 1 for times in self._compared.values()]
        batches = {cell[:2] for cell in self._compared}
        return Spread(device, driver, len(self._owed), len(batches), median(apart), max(apart))
