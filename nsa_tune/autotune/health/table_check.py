"""The table check: does a table that was measured earlier, or elsewhere, hold on this machine?

A table is right as long as its choices are. The check times a few anchor batches again: batches on
which the best two arms are close, but no tie. There the effect of a new driver or library shows
first.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil, inf
from pathlib import Path
from statistics import median

from nsa_tune._errors import NoTunedData, StoreError, UsageError
from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.bench.registry import REGISTRY
from nsa_tune.autotune.runner.progress import Progress
from nsa_tune.autotune.runner.run import RunRequest, run
from nsa_tune.autotune.search.farthest_point import farthest_point_order
from nsa_tune.autotune.search.schedule import FixedSchedule, Schedule
from nsa_tune.backend.costmodel.regret import MARGIN, regret
from nsa_tune.backend.dispatch.environment import warn_of_missing_files
from nsa_tune.backend.dispatch.matching import Here, differing, in_order, nothing_for
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Arm, Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db import places, search
from nsa_tune.db import reader as tables
from nsa_tune.db.checks import Anchor, Check
from nsa_tune.db.store import Store

MOST_REGRET = 0.03
"""The most that a choice of the table may lose on an anchor batch. Two runs on one machine differ
by a third of that (p90)."""
MOST_DRIFT = 0.1
"""The most that the median time may differ from the table's. Beyond, its estimates are wrong."""
_NO_TIE = 0.05
"""The least relative gap between the best two arms of an anchor batch."""
_CLOSEST = 1 / 3
"""Anchor batches are chosen among this share of the batches, those with the smallest gap."""
_LONGEST_US = 5000.0
"""Batches with a slower arm are no anchors: a check should take seconds."""


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """The options of `nsa-tune check`."""

    gpu: str
    """The device's name, as the driver reports it."""
    model: str
    heads: int
    """Local heads."""
    kv_dtype: str
    database: Path | None = None
    """Searched first for tables, and where the outcome is stored; None takes the default one."""
    device: str = "auto"
    anchors: int = 4
    """Anchor batches of every decision point."""
    keep: bool = True
    """Store the outcome in the database."""
    isolate: bool = True
    """Measure in worker processes."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found."""

    check: Check
    table: Table
    differences: tuple[str, ...]
    """How this machine's driver and libraries differ from those of the table."""
    problems: tuple[str, ...]
    """Why the table does not hold, one sentence each; empty when it does."""
    seconds: float
    not_kept: str = ""
    """Why the outcome could not be stored; otherwise empty."""


def check(
    request: CheckRequest, progress: Progress | None = None, *, registry: str = REGISTRY
) -> CheckResult:
    """Time anchor batches of this machine's table again, and compare.

    Raises:
        NoTunedData: when there is no such table, or it has no anchor batch.
        UsageError: when the device is not of the GPU model that is asked for.
        MachineUnfit: when this machine cannot measure.
        KeyboardInterrupt: when it is interrupted; some of the batches alone prove nothing.
    """
    layout = profile_of(request.model).layout(request.kv_dtype)
    wanted = tables.Wanted(request.gpu, request.model, request.heads, str(layout))
    here = Here.of(request.gpu)
    warn_of_missing_files(os.environ)
    found = (stored.read() for stored in in_order(request.database, wanted, here))
    table = next(filter(search.succeeded, found), None)
    if table is None:
        raise NoTunedData(nothing_for(request.database, wanted))
    jobs: list[Job] = []

    def make_schedule(
        points: Sequence[Point], setting: Setting, stored: Sequence[Measurement]
    ) -> Schedule:
        del stored
        if setting.device.name != request.gpu:
            raise UsageError(
                f"{request.device} is {setting.device.name!r}, and the table is of "
                f"{request.gpu!r}: check it on that device, and number the devices as the driver "
                "does (CUDA_DEVICE_ORDER=PCI_BUS_ID)"
            )
        rows = _amortised(table.measurements, setting.sharing)
        jobs.extend(anchor_jobs(points, setting, rows, request.anchors))
        return FixedSchedule(jobs)

    with tempfile.TemporaryDirectory() as directory:
        result = run(
            RunRequest(
                Path(directory, "check.db"), request.device, request.model, request.heads,
                request.kv_dtype, ceilings=False, isolate=request.isolate,
            ),
            progress, make_schedule, registry=registry,
        )  # fmt: skip
    if result.outcome == "interrupted":
        raise KeyboardInterrupt
    if not jobs:
        raise NoTunedData(f"{table.source} has no batch with two arms that are worth comparing")
    outcome = _compare(table, result.table, jobs)
    return CheckResult(
        outcome, table, tuple(differing(table, here)), tuple(_problems(outcome)), result.seconds,
        _store(outcome, request.database or places.database_to_write()) if request.keep else "",
    )  # fmt: skip


def _store(outcome: Check, database: Path) -> str:
    """Store `outcome`; returns why that failed, since the caller can still print the outcome."""
    if database.suffix == ".tsv":
        return f"{database} is a text table, which keeps no outcomes"
    try:
        with Store.open(database) as store:
            store.add_check(outcome)
    except StoreError as error:
        return str(error)
    return ""


def _compare(table: Table, now: Table, jobs: Sequence[Job]) -> Check:
    layers = Setting.of(now).sharing
    there, here = (_amortised(side.measurements, layers) for side in (table, now))
    anchors = tuple(compare_anchors(jobs, there, here))
    drift = drift_of(anchors)
    holds = abs(drift) <= MOST_DRIFT and not any(anchor.problem for anchor in anchors)
    checked_at = datetime.now(UTC).isoformat(timespec="microseconds")
    return Check(
        table.key.digest, now.key.driver, now.key.libraries, checked_at, holds, drift, anchors
    )


def _amortised(rows: Iterable[Measurement], layers: int) -> list[Measurement]:
    """`rows` with a layer's share of the cost of a pass in each time, as plans compare arms."""
    return [row.amortised(layers) for row in rows]


def _problems(outcome: Check) -> list[str]:
    problems = [f"{anchor.batch}: {anchor.problem}" for anchor in outcome.anchors if anchor.problem]
    if abs(outcome.drift) > MOST_DRIFT:
        word = "more" if outcome.drift > 0 else "less"
        problems.append(f"arms take {abs(outcome.drift):.0%} {word} time than in the table")
    return problems


# --- which batches to time again


def anchor_jobs(
    points: Sequence[Point], setting: Setting, table: Sequence[Measurement], each: int
) -> Iterator[Job]:
    """At most `each` anchor batches of every point, far from each other, with the table's arms."""
    successes = _successes(table)
    for point in points:
        arms = {arm.name: arm for arm in point.candidates(setting)}
        close: list[tuple[float, str, Batch]] = []
        features = point.features(setting)
        for (name, word), rows in successes.items():
            if name == point.name:
                batch = Batch.parse(word)
                gap = _gap([row for arm, row in rows.items() if _runs(arms, arm, batch, setting)])
                if _NO_TIE <= gap < inf:
                    close.append((gap, word, batch))
        close = sorted(close, key=lambda candidate: candidate[:2])[
            : max(ceil(_CLOSEST * len(close)), each)
        ]
        positions = [features.position(batch) for _, _, batch in close]
        places = [(float(at.regime), *at.coordinates) for at in positions]
        for i in farthest_point_order(places)[:each]:
            _, word, batch = close[i]
            measured = successes[point.name, word]
            names = [name for name in arms if name in measured]
            chosen = [arms[name] for name in names if _runs(arms, name, batch, setting)]
            yield Job(point, batch, tuple(chosen))


def _runs(arms: Mapping[str, Arm], name: str, batch: Batch, setting: Setting) -> bool:
    """Whether this machine has the arm and may run it on `batch`."""
    arm = arms.get(name)
    return arm is not None and arm.allowed(batch, setting) is None


def _gap(rows: Sequence[Measurement]) -> float:
    """The relative gap of the best two; infinite when there is only one, or an arm is too slow."""
    times = sorted(row.latency_us or inf for row in rows)
    if len(times) < 2 or times[-1] > _LONGEST_US:
        return inf
    return times[1] / times[0] - 1


def _successes(rows: Iterable[Measurement]) -> dict[tuple[str, str], dict[str, Measurement]]:
    """By (point, batch) and arm, the rows of arms that succeeded."""
    successes: dict[tuple[str, str], dict[str, Measurement]] = {}
    for row in rows:
        if row.status is Status.OK:
            successes.setdefault((row.point, row.batch), {})[row.arm] = row
    return successes


# --- what their times say


def compare_anchors(
    jobs: Iterable[Job], table: Sequence[Measurement], here: Sequence[Measurement]
) -> Iterator[Anchor]:
    """Compare the rows of `jobs` in `table` with those measured `here`; one anchor for each job."""
    before, now = _successes(table), _successes(here)
    reasons = {(row.point, row.batch, row.arm): row.reason for row in here}
    for job in jobs:
        cell = (job.point.name, str(job.batch))
        names = [arm.name for arm in job.arms]
        there = {name: before[cell][name] for name in names}
        timed = {name: row for name, row in now.get(cell, {}).items() if name in there}
        problem = "; ".join(
            f"{name} failed: {reasons.get((*cell, name)) or 'it was not measured'}"
            for name in names
            if name not in timed
        )
        yield Anchor(
            *cell, _latencies(there), _latencies(timed),
            problem or _wrong_choice(job.point, there, timed),
        )  # fmt: skip


def _latencies(rows: Mapping[str, Measurement]) -> dict[str, float]:
    return {name: row.latency_us for name, row in rows.items() if row.latency_us is not None}


def _wrong_choice(
    point: Point, there: Mapping[str, Measurement], here: Mapping[str, Measurement]
) -> str:
    """Which choice of the table surely loses too much here; empty when none does.

    It is sure when the intervals of the two arms are further apart than a tie's margin.
    """
    before, now = _latencies(there), _latencies(here)
    for question in point.questions:
        arms = [arm for some in question.choices.values() for arm in some if arm in before]
        if len(arms) < 2:
            continue
        chosen = min(arms, key=before.__getitem__)
        best = min(arms, key=now.__getitem__)
        lost = regret({arm: now[arm] for arm in arms}, chosen)
        sure = (here[chosen].low_us or inf) > (1 + MARGIN) * (here[best].high_us or inf)
        if lost > MOST_REGRET and sure:
            return (
                f"{question.name}: {chosen} was faster, and now takes {lost:.1%} more than {best}"
            )
    return ""


def drift_of(anchors: Iterable[Anchor]) -> float:
    """The median over arms and batches of time here over the table's, minus one; 0 without any."""
    ratios = [
        here / anchor.there_us[arm] for anchor in anchors for arm, here in anchor.here_us.items()
    ]
    return median(ratios) - 1 if ratios else 0.0
