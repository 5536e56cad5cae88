"""Which schedule a run follows: the whole grid, or as much of it as a target regret takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from nsa_tune.autotune.adaptive import Adaptive, Weighted, most_frequent
from nsa_tune.autotune.schedule import Exhaustive, MakeSchedule, Schedule
from nsa_tune.autotune.traced import weighted_batches
from nsa_tune.backend.batch import Batch
from nsa_tune.backend.point import Point, Setting
from nsa_tune.backend.records import Measurement

__all__ = ["schedule_for"]


def schedule_for(target_regret: float, trace: Path | None) -> MakeSchedule:
    """Makes an adaptive schedule, or with a target of 0 one of every batch.

    Raises:
        UsageError: when `trace` cannot be read.
    """
    batches = [] if trace is None else weighted_batches(trace)
    if target_regret > 0:
        return partial(Adaptive, target_regret=target_regret, trace=batches)
    return partial(_whole, batches) if batches else Exhaustive


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
