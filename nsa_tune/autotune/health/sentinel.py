"""The sentinel: does a table that was measured earlier, or elsewhere, hold on this machine?"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from nsa_tune._errors import NoTunedData, StoreError
from nsa_tune.autotune.bench.registry import REGISTRY
from nsa_tune.autotune.health.anchors import MOST_DRIFT, anchors_of, drift_of, jobs_of
from nsa_tune.autotune.runner.progress import Progress
from nsa_tune.autotune.runner.run import RunRequest, run
from nsa_tune.autotune.runner.schedule import Job, Schedule
from nsa_tune.autotune.worker.isolation import Deadlines
from nsa_tune.backend.dispatch.matching import Here, differing, in_order, nothing_for
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Table
from nsa_tune.db import reader as tables
from nsa_tune.db.checks import Check
from nsa_tune.db.store import Store

__all__ = ["CheckRequest", "CheckResult", "check"]


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What `nsa-tune check` was asked for."""

    gpu: str
    """The device's name, as the driver reports it."""
    model: str
    heads: int
    kv_dtype: str
    database: Path | None = None
    """Where tables are looked for first, and the outcome is kept; None takes the default one."""
    device: str = "auto"
    anchors: int = 4
    """Batches of every decision point."""
    keep: bool = True
    """Store the outcome in the database."""
    isolate: bool = True
    deadlines: Deadlines = field(default_factory=Deadlines)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found."""

    check: Check
    table: Table
    differences: tuple[str, ...]
    """In what this machine differs from the one that measured the table."""
    problems: tuple[str, ...]
    """Why the table does not hold, one sentence each; none when it does."""
    seconds: float
    not_kept: str = ""
    """Why the outcome is not in the database; empty where it is, or was not to be."""


def check(
    request: CheckRequest, progress: Progress | None = None, *, registry: str = REGISTRY
) -> CheckResult:
    """Time a few cells of the table for this machine again, and compare.

    Raises:
        NoTunedData: when there is no such table, or it has no cell to compare.
        MachineUnfit: when this machine cannot measure.
        KeyboardInterrupt: as the run, so that a part of the cells concludes nothing.
    """
    layout = profile_of(request.model).layout(request.kv_dtype)
    wanted = tables.Wanted(request.gpu, request.model, request.heads, str(layout))
    here = Here.of(request.gpu)
    found = in_order(tables.find(request.database, **wanted._asdict()), here)
    if not found:
        raise NoTunedData(nothing_for(request.database, wanted))
    table = found[0]
    jobs: list[Job] = []

    def chosen(points: Sequence[Point], setting: Setting, known: Sequence[Measurement]) -> Schedule:
        del known
        jobs.extend(jobs_of(points, setting, table.measurements, request.anchors))
        return _Fixed(jobs)

    with tempfile.TemporaryDirectory() as directory:
        result = run(
            RunRequest(
                Path(directory, "check.db"), request.device, request.model, request.heads,
                request.kv_dtype, ceilings=False, isolate=request.isolate,
                deadlines=request.deadlines,
            ),
            progress, chosen, registry=registry,
        )  # fmt: skip
    if result.outcome == "interrupted":
        raise KeyboardInterrupt
    if not jobs:
        raise NoTunedData(f"{table.source} has no batch with two arms that are worth comparing")
    outcome = _judged(table, result.table, jobs)
    return CheckResult(
        outcome, table, tuple(differing(table, here)), tuple(_problems(outcome)), result.seconds,
        _keep(outcome, request.database or tables.default_database()) if request.keep else "",
    )  # fmt: skip


def _keep(outcome: Check, database: Path) -> str:
    """Store `outcome`; returns why that failed. What was found is worth saying all the same."""
    if database.suffix == ".tsv":
        return f"{database} is a text table, which keeps no outcomes"
    try:
        with Store.open(database) as store:
            store.add_check(outcome)
    except StoreError as error:
        return str(error)
    return ""


def _judged(table: Table, now: Table, jobs: Sequence[Job]) -> Check:
    anchors = tuple(anchors_of(jobs, table.measurements, now.measurements))
    drift = drift_of(anchors)
    holds = abs(drift) <= MOST_DRIFT and not any(anchor.problem for anchor in anchors)
    checked_at = datetime.now(UTC).isoformat(timespec="microseconds")
    return Check(
        table.key.digest, now.key.driver, now.key.libraries, checked_at, holds, drift, anchors
    )


def _problems(outcome: Check) -> list[str]:
    found = [f"{one.batch}: {one.problem}" for one in outcome.anchors if one.problem]
    if abs(outcome.drift) > MOST_DRIFT:
        word = "more" if outcome.drift > 0 else "less"
        found.append(f"arms take {abs(outcome.drift):.0%} {word} time than in the table")
    return found


class _Fixed:
    """A schedule of jobs that were chosen before."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = deque(jobs)

    def next(self) -> Job | None:
        return self._jobs.popleft() if self._jobs else None

    def done(self, job: Job, measurements: Sequence[Measurement]) -> None:
        """Nothing: they are judged when all are there."""

    def remaining(self) -> tuple[int, float | None]:
        return len(self._jobs), None

    def expected(self) -> dict[str, float]:
        return {}
