"""Which schedule a run follows: the whole grid, or as much of it as a target regret takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from nsa_tune.autotune.runner.schedule import Exhaustive, MakeSchedule, Schedule
from nsa_tune.autotune.search.adaptive import Adaptive
from nsa_tune.autotune.search.weights import Weighted, most_frequent
from nsa_tune.autotune.workload.traced import weighted_batches
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Measurement

__all__ = ["schedule_for"]

_log = logging.getLogger(__name__)


def schedule_for(target_regret: float, trace: Path | None) -> MakeSchedule:
    """Makes an adaptive schedule, or with a target of 0 one of every batch.

    Raises:
        UsageError: when `trace` cannot be read.
    """
    if trace is None:
        return partial(Adaptive, target_regret=target_regret) if target_regret > 0 else Exhaustive
    batches = weighted_batches(trace)
    make: MakeSchedule = partial(_whole, batches)
    if target_regret > 0:
        make = partial(Adaptive, target_regret=target_regret, trace=batches)
    return partial(_traced, trace, batches, make)


def _traced(
    path: Path, trace: Sequence[Weighted], make: MakeSchedule, points: Sequence[Point],
    setting: Setting, known: Sequence[Measurement],
) -> Schedule:  # fmt: skip
    """What `make` makes, after a word on the batches of the trace that no point takes."""
    taken = {
        batch
        for point in points
        for batch, _ in most_frequent(point, point.grid(setting), trace)
        if sum(arm.allowed(batch, setting) is None for arm in point.candidates(setting)) > 1
    }
    total = sum(count for _, count in trace)
    left_out = sum(count for batch, count in trace if batch not in taken)
    if left_out:
        _log.warning(
            "%s: %.0f of %.0f passes drawn from it are left out, since no decision point of this "
            "run has a choice on them, or they are larger than all of its grid's batches",
            path, left_out, total,
        )  # fmt: skip
    return make(points, setting, known)


def _whole(
    trace: Sequence[Weighted], points: Sequence[Point], setting: Setting,
    known: Sequence[Measurement],
) -> Schedule:  # fmt: skip
    """Every grid, each followed by the batches of a trace that are its point's."""
    longer = []
    for point in points:
        grid = point.grid(setting)
        own = [batch for batch, _ in most_frequent(point, grid, trace)]
        longer.append(replace(point, grid=partial(_grid, [*grid, *own])))
    return Exhaustive(longer, setting, known)


def _grid(batches: list[Batch], setting: Setting) -> list[Batch]:
    del setting
    return batches
