"""The interface of a schedule, which says what batch is measured next; and one of given jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from nsa_tune.autotune.bench.job import Job
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Measurement


class Schedule(Protocol):
    """Hands out jobs, and learns their results. There is one for each key, called by one thread.

    With several GPUs, jobs are in progress while the next one is asked for.
    """

    def next(self) -> Job | None:
        """The next job; None when there is none before a job in progress is done.

        A sweep ends when this is None and no job is in progress.
        """

    def done(self, job: Job, measurements: Sequence[Measurement]) -> None:
        """`job` has ended with `measurements`.

        An arm that failed has a row that says so. A quarantined arm has none.
        """

    def remaining(self) -> int:
        """How many jobs are still to be handed out, as far as that is known."""


MakeSchedule: TypeAlias = Callable[[Sequence[Point], Setting, Sequence[Measurement]], Schedule]
"""Makes the schedule of one key from its points, its setting and the rows stored before."""


class FixedSchedule:
    """A `Schedule` of jobs that are known from the start. Results do not change it."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = deque(jobs)

    def next(self) -> Job | None:
        """The next of the jobs, in their order."""
        return self._jobs.popleft() if self._jobs else None

    def done(self, job: Job, measurements: Sequence[Measurement]) -> None:
        """Nothing."""

    def remaining(self) -> int:
        """The jobs that are left."""
        return len(self._jobs)
