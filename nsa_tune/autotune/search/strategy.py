"""The strategy of a run: exhaustive or adaptive, with or without the batches of a trace."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nsa_tune.autotune.search.adaptive import Adaptive
from nsa_tune.autotune.search.exhaustive import Exhaustive
from nsa_tune.autotune.search.schedule import MakeSchedule, Schedule
from nsa_tune.autotune.search.traced import most_frequent
from nsa_tune.autotune.workload.weighted_batches import WeightedBatch, weighted_batches
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Measurement

_log = logging.getLogger(__name__)


def schedule_for(target_regret: float, trace: Path | None) -> MakeSchedule:
    """What makes a run's schedules: adaptive ones, or with a target regret of 0 exhaustive ones.

    Args:
        trace: requests or a decision log whose batches are measured too.

    Raises:
        UsageError: when `trace` cannot be read.
    """
    if trace is None:
        return partial(Adaptive, target_regret=target_regret) if target_regret > 0 else Exhaustive
    batches = weighted_batches(trace)
    make: MakeSchedule = partial(Exhaustive, trace=batches)
    if target_regret > 0:
        make = partial(Adaptive, target_regret=target_regret, trace=batches)
    return partial(_make_and_warn, trace, batches, make)


def _make_and_warn(
    path: Path, trace: Sequence[WeightedBatch], make: MakeSchedule, points: Sequence[Point],
    setting: Setting, stored: Sequence[Measurement],
) -> Schedule:  # fmt: skip
    """The schedule that `make` makes, after a warning about batches of the trace that no point
    measures."""
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
            "%s: %.0f of %.0f passes drawn from it are left out: no decision point of this run has "
            "two arms for them, or they are larger than every batch of its grid",
            path, left_out, total,
        )  # fmt: skip
    return make(points, setting, stored)
