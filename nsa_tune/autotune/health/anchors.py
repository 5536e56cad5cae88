"""Anchors: a few cells of a table that tell whether it still holds, and what they tell.

A table is right as long as its choices are. Anchors are batches on which two arms are close, but
no tie: there a change of a library or a driver shows first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil, inf
from statistics import median

from nsa_tune.autotune.runner.schedule import Job
from nsa_tune.autotune.search.expected import realised_regret
from nsa_tune.autotune.search.spacing import farthest_first
from nsa_tune.backend.dispatch.decide import MARGIN
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.db.checks import Anchor

__all__ = ["MOST_DRIFT", "MOST_REGRET", "anchors_of", "drift_of", "jobs_of"]

MOST_REGRET = 0.03
"""What a choice of the table may lose on an anchor. Runs differ by a third of it (p90)."""
MOST_DRIFT = 0.1
"""How far times may be from the table's, in the median: beyond, its estimates say nothing."""
_NO_TIE = 0.05
"""Between the best two arms of an anchor."""
_CLOSEST = 1 / 3
"""The share of the batches, those whose best two arms are closest, that anchors are taken from."""
_LONGEST_US = 5000.0
"""A check is to take seconds."""

Times = Mapping[tuple[str, str], Mapping[str, Measurement]]
"""(point, batch) to arm to what succeeded."""


def jobs_of(
    points: Sequence[Point], setting: Setting, table: Sequence[Measurement], each: int
) -> Iterator[Job]:
    """At most `each` anchors of every point, far from each other."""
    times = _times(table)
    for point in points:
        arms = {arm.name: arm for arm in point.candidates(setting)}
        close: list[tuple[float, str, Batch]] = []
        for (name, word), by_arm in times.items():
            if name == point.name:
                batch = Batch.parse(word)
                gap = _gap([row for arm, row in by_arm.items() if _open(arms, arm, batch, setting)])
                if _NO_TIE <= gap < inf:
                    close.append((gap, word, batch))
        close = sorted(close, key=lambda one: one[:2])[: max(ceil(_CLOSEST * len(close)), each)]
        places = [(float(point.sheet(b, setting)), *point.locate(b, setting)) for _, _, b in close]
        for i in farthest_first(places)[:each]:
            _, word, batch = close[i]
            measured = times[point.name, word]
            names = [name for name in arms if name in measured]
            chosen = [arms[name] for name in names if _open(arms, name, batch, setting)]
            yield Job(point, batch, tuple(chosen))


def _open(arms: Mapping[str, object], name: str, batch: Batch, setting: Setting) -> bool:
    arm = arms.get(name)
    return arm is not None and arm.allowed(batch, setting) is None  # type: ignore[attr-defined]


def _gap(rows: Sequence[Measurement]) -> float:
    """How far the best two are apart, relatively; infinite where there are none, or one is slow."""
    times = sorted(row.latency_us or inf for row in rows)
    if len(times) < 2 or times[-1] > _LONGEST_US:
        return inf
    return times[1] / times[0] - 1


def _times(rows: Iterable[Measurement]) -> dict[tuple[str, str], dict[str, Measurement]]:
    found: dict[tuple[str, str], dict[str, Measurement]] = {}
    for row in rows:
        if row.status is Status.OK:
            found.setdefault((row.point, row.batch), {})[row.arm] = row
    return found


def anchors_of(
    jobs: Iterable[Job], table: Sequence[Measurement], here: Sequence[Measurement]
) -> Iterator[Anchor]:
    """What each job says of `table`, now that `here` was measured."""
    before, now = _times(table), _times(here)
    reasons = {(row.point, row.batch, row.arm): row.reason for row in here}
    for job in jobs:
        cell = (job.point.name, str(job.batch))
        names = [arm.name for arm in job.arms]
        there = {name: before[cell][name] for name in names}
        found = {name: row for name, row in now.get(cell, {}).items() if name in there}
        lost = [name for name in names if name not in found]
        problem = "; ".join(
            f"{name} failed: {reasons.get((*cell, name)) or 'it was not measured'}"
            for name in lost
        )  # fmt: skip
        yield Anchor(
            *cell, _latencies(there), _latencies(found),
            problem or _wrong_choice(job.point, there, found),
        )  # fmt: skip


def _latencies(rows: Mapping[str, Measurement]) -> dict[str, float]:
    return {name: row.latency_us for name, row in rows.items() if row.latency_us is not None}


def _wrong_choice(
    point: Point, there: Mapping[str, Measurement], here: Mapping[str, Measurement]
) -> str:
    """Which of the table's choices loses too much here, beyond what the intervals leave open."""
    before, now = _latencies(there), _latencies(here)
    for answer in point.answers:
        arms = [arm for of in answer.choices.values() for arm in of if arm in before]
        if len(arms) < 2:
            continue
        chosen = min(arms, key=before.__getitem__)
        best = min(arms, key=now.__getitem__)
        regret = realised_regret(answer, chosen, now) or 0.0
        sure = (here[chosen].low_us or inf) > (1 + MARGIN) * (here[best].high_us or inf)
        if regret > MOST_REGRET and sure:
            return (
                f"{answer.name}: {chosen} was faster, and now takes {regret:.1%} more than {best}"
            )
    return ""


def drift_of(anchors: Iterable[Anchor]) -> float:
    """The median of time here over time there, minus one; 0 without a cell in both."""
    ratios = [
        here / anchor.there_us[arm] for anchor in anchors for arm, here in anchor.here_us.items()
    ]
    return median(ratios) - 1 if ratios else 0.0
