"""The exhaustive schedule: every batch of the points' grids, and of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.search.schedule import FixedSchedule
from nsa_tune.autotune.search.traced import most_frequent
from nsa_tune.autotune.workload.weighted_batches import WeightedBatch
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Measurement


class Exhaustive(FixedSchedule):
    """Measures every batch on which at least two arms may run. Points take turns."""

    def __init__(
        self, points: Sequence[Point], setting: Setting, stored: Sequence[Measurement],
        *, trace: Sequence[WeightedBatch] = (),
    ) -> None:  # fmt: skip
        measured = {(row.point, row.batch, row.arm) for row in stored}
        queues = [list(_missing(point, setting, trace, measured)) for point in points]
        jobs = [job for turn in zip_longest(*queues) for job in turn if job is not None]
        super().__init__(jobs)


def _missing(
    point: Point, setting: Setting, trace: Sequence[WeightedBatch],
    stored: set[tuple[str, str, str]],
) -> Iterator[Job]:  # fmt: skip
    """Jobs for what is not stored of the point's grid, then of the trace."""
    arms = list(point.candidates(setting))
    grid = point.grid(setting)
    for batch in [*grid, *(batch for batch, _ in most_frequent(point, grid, trace))]:
        allowed = [arm for arm in arms if arm.allowed(batch, setting) is None]
        word = str(batch)
        missing = tuple(a for a in allowed if (point.name, word, a.name) not in stored)
        if len(allowed) > 1 and missing:
            yield Job(point, batch, missing)
