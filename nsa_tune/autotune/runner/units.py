"""Units: several devices of one model that share a sweep, and those that are out of line."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from nsa_tune.autotune.runner.schedule import Job
from nsa_tune.backend.types.records import Measurement

__all__ = ["OUT_OF_LINE", "Anchors", "UnitReport"]

OUT_OF_LINE = 0.03
"""Units of one model are within 1 % of each other; beyond this something is wrong with one."""
_ANCHORS = 5
"""Batches that every unit measures."""


@dataclass(frozen=True, slots=True)
class UnitReport:
    """One device's part in a run."""

    unit: str
    device: str
    """Its name."""
    batches: int
    """That it measured for the table."""
    ratio: float | None
    """Its time over what is usual among the units, on the same cells; None without others."""

    @property
    def out_of_line(self) -> bool:
        """Whether it is so much faster or slower that its rows do not fit the others'."""
        return self.ratio is not None and abs(self.ratio - 1) > OUT_OF_LINE


class Anchors:
    """The first few jobs of a sweep, which all its units measure.

    Only the unit that a job was handed to first stores its rows.
    """

    def __init__(self, units: Sequence[str]) -> None:
        self._owed: dict[str, deque[Job]] = {unit: deque() for unit in units}
        self._times: dict[str, dict[tuple[str, str, str], float]] = {unit: {} for unit in units}
        self._jobs = 0

    def handed_out(self, job: Job, unit: str) -> None:
        """`unit` got `job`; if it is one of the first, the others owe it too."""
        if self._jobs == _ANCHORS or len(self._owed) == 1:
            return
        self._jobs += 1
        for other, owed in self._owed.items():
            if other != unit:
                owed.append(job)

    def owed_by(self, unit: str) -> Job | None:
        """The next anchor that `unit` has not measured."""
        return self._owed[unit].popleft() if self._owed[unit] else None

    def note(self, unit: str, rows: Iterable[Measurement]) -> None:
        """What `unit` measured, anchors or not."""
        for row in rows:
            if row.latency_us is not None:
                self._times[unit][row.point, row.batch, row.arm] = row.latency_us

    def ratio(self, unit: str) -> float | None:
        """How long `unit` takes, over what is usual: the median over the cells that others
        measured too. Of two units the other one is the usual."""
        usual = list(self._times.values())
        if len(usual) == 2:
            usual.remove(self._times[unit])
        ratios = []
        for cell, time in self._times[unit].items():
            times = [measured[cell] for measured in usual if cell in measured]
            if len(times) == len(usual):
                ratios.append(time / median(times))
        return median(ratios) if ratios and len(self._times) > 1 else None
