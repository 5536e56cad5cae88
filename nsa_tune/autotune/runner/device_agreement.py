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

__all__ = ["OUT_OF_LINE", "SHARED_BY_A_SAMPLE", "DeviceAgreement", "DeviceReport", "Spread"]

OUT_OF_LINE = 0.03
"""Healthy GPUs of one model are within 1 % of each other. Beyond this, one has a problem."""
SHARED_BY_A_SAMPLE = 20
"""Batches that every unit of a sample measures: they speak for the units that are not in it."""
_SHARED_JOBS = 5
"""Batches that every unit measures otherwise."""
_Cell: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one unit did in a run."""

    unit: str
    """A GPU's UUID, or "cpu"."""
    device: str
    """Name of its model."""
    batches: int
    """That it measured for the table."""
    ratio: float | None
    """Its time over the other units' on the same batches; None for a single unit."""
    node: str = ""
    """Name of its node in a cluster; empty on this host."""

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
        self._times: dict[str, dict[_Cell, float]] = {unit: {} for unit in units}
        self._shared: list[Job] = []

    def join(self, unit: str) -> None:
        """`unit` has come later: it owes all shared jobs."""
        self._owed[unit] = deque(self._shared)
        self._times[unit] = {}

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
            if row.latency_us is not None:
                self._times[unit][row.point, row.batch, row.arm] = row.latency_us

    def ratio(self, unit: str) -> float | None:
        """Time of `unit` over the usual time, as the median over what others measured too.

        The usual time is the median of all units; of two units it is the other one's.
        """
        ratios = []
        for cell, time in self._times[unit].items():
            others = [
                measured[cell]
                for other, measured in self._times.items()
                if other != unit and cell in measured
            ]
            if others:
                ratios.append(time / median(others if len(others) == 1 else [time, *others]))
        return median(ratios) if ratios else None

    def shared_times(self, unit: str) -> dict[_Cell, float]:
        """What `unit` took on the batches that another unit measured too, in microseconds."""
        others = [times for other, times in self._times.items() if other != unit]
        return {
            cell: time
            for cell, time in self._times[unit].items()
            if any(cell in times for times in others)
        }

    def spread(self, device: str, driver: str) -> Spread | None:
        """How far the units are apart; None when no batch was measured by two of them."""
        cells: dict[_Cell, list[float]] = {}
        for unit in self._times:
            for cell, time in self.shared_times(unit).items():
                cells.setdefault(cell, []).append(time)
        if not cells:
            return None
        apart = [max(times) / min(times) - 1 for times in cells.values()]
        batches = {cell[:2] for cell in cells}
        return Spread(device, driver, len(self._times), len(batches), median(apart), max(apart))
