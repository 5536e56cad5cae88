"""Schedule: which batch is measured next. `Exhaustive` takes all of the points' grids in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol, TypeAlias

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Arm, Point, Setting
from nsa_tune.backend.types.records import Measurement

__all__ = ["Exhaustive", "Job", "MakeSchedule", "Schedule"]


@dataclass(frozen=True, slots=True)
class Job:
    """One batch to measure, with the arms to time against each other on it."""

    point: Point
    batch: Batch
    arms: tuple[Arm, ...]


class Schedule(Protocol):
    """Hands out jobs, and hears what became of them. One for each key; called by one thread.

    With several GPUs some jobs are under way while the next one is asked for.
    """

    def next(self) -> Job | None:
        """The next job, or None when there is none before another one is done.

        A run ends when this is None while no job is under way.
        """
        ...

    def done(self, job: Job, measurements: Sequence[Measurement]) -> None:
        """`job` has ended with `measurements`.

        An arm that is quarantined has none, one that failed has one that says so.
        """
        ...

    def remaining(self) -> tuple[int, float | None]:
        """How many jobs are still to be handed out, as far as that is known, and the seconds
        that they will take, or None where only the pace so far can tell."""
        ...

    def expected(self) -> dict[str, float]:
        """The regret that is expected to be left, by question; empty where nobody estimates it."""
        ...


MakeSchedule: TypeAlias = Callable[[Sequence[Point], Setting, Sequence[Measurement]], Schedule]
"""Makes the schedule of one key from its points, its setting and what is measured already."""


_LAST = 32
"""The last jobs go largest first, so that devices that share them end together: the largest takes
a second, the others a tenth of it."""
_MANY = 4 * _LAST
"""With fewer jobs the grid's order, coarse batches first, is worth more."""


class Exhaustive:
    """Every batch of a grid that leaves a choice, in the grids' order; points in turn."""

    def __init__(
        self, points: Sequence[Point], setting: Setting, known: Sequence[Measurement]
    ) -> None:
        stored = {(row.point, row.batch, row.arm) for row in known}
        queues = [list(_missing(point, setting, stored)) for point in points]
        jobs = [job for turn in zip_longest(*queues) for job in turn if job is not None]
        if len(jobs) >= _MANY:
            jobs[-_LAST:] = sorted(jobs[-_LAST:], key=_size, reverse=True)
        self._jobs = deque(jobs)

    def next(self) -> Job | None:
        """The next batch of the grid that lacks a measurement."""
        return self._jobs.popleft() if self._jobs else None

    def done(self, job: Job, measurements: Sequence[Measurement]) -> None:
        """Nothing: the grid is the grid."""

    def remaining(self) -> tuple[int, float | None]:
        """What is left of the grid."""
        return len(self._jobs), None

    def expected(self) -> dict[str, float]:
        """Nothing: a grid does not ask."""
        return {}


def _size(job: Job) -> tuple[int, int]:
    """What orders jobs by the time that they take, roughly."""
    return job.batch.q_tokens, job.batch.kv_tokens


def _missing(point: Point, setting: Setting, stored: set[tuple[str, str, str]]) -> Iterator[Job]:
    """What is missing of a point's grid. A batch that leaves no choice needs no measuring."""
    arms = list(point.candidates(setting))
    for batch in point.grid(setting):
        allowed = [arm for arm in arms if arm.allowed(batch, setting) is None]
        word = str(batch)
        missing = tuple(a for a in allowed if (point.name, word, a.name) not in stored)
        if len(allowed) > 1 and missing:
            yield Job(point, batch, missing)
