"""Cells that only one side of a comparison has, and why the other has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from nsa_tune._errors import BatchError
from nsa_tune.backend.types.batch import Batch
from nsa_tune.reports.compare.judging import Judged, Rows, Verdict

if TYPE_CHECKING:
    from nsa_tune.backend.types.point import Arm, Point, Setting

__all__ = ["one_sided"]


def one_sided(
    ours: Rows, theirs: Rows, points: Mapping[str, Point], before: Setting, after: Setting
) -> Iterator[Judged]:
    """The cells that are missing on the second side, then those that are new on it."""
    for verdict, here, there, other in (
        (Verdict.ONLY_BEFORE, ours, theirs, after),
        (Verdict.ONLY_AFTER, theirs, ours, before),
    ):
        for place, row in here.items():
            if place not in there:
                times = (row.latency_us, None)
                one, two = times if verdict is Verdict.ONLY_BEFORE else times[::-1]
                reason = _reason(*place, points, other)
                yield Judged(*place, verdict, reason, None, None, None, one, two)


def _reason(point: str, batch: str, arm: str, points: Mapping[str, Point], other: Setting) -> str:
    """The limit that keeps the arm from running on the other side; else nobody measured it."""
    declared = _arm(points.get(point), arm)
    if declared is not None:
        try:
            limit = declared.allowed(Batch.parse(batch), other)
        except BatchError:
            limit = None
        if limit is not None:
            return f"not allowed on the other side: {limit}"
    return "not measured on the other side"


def _arm(point: Point | None, name: str) -> Arm | None:
    if point is None:
        return None
    return next((arm for arm in point.arms if arm.name == name), None)
