"""A sweep: everything that a run measures under one key, on one device or on several equal ones."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from nsa_tune.autotune.bench.ceilings import POINT as CEILINGS
from nsa_tune.autotune.bench.ceilings import lacks_ceilings
from nsa_tune.autotune.bench.failures import out_of_memory
from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.runner.device_agreement import (
    SHARED_BY_A_SAMPLE,
    DeviceAgreement,
    DeviceReport,
    Spread,
)
from nsa_tune.autotune.runner.quarantine import Quarantine, Quarantined
from nsa_tune.autotune.runner.row_writer import RowWriter
from nsa_tune.autotune.search.schedule import MakeSchedule
from nsa_tune.autotune.worker.messages import Ready
from nsa_tune.backend.types.point import Point
from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.db.store import Store, UnitOfRun


@dataclass(frozen=True, slots=True)
class Task:
    """A job that a unit measures."""

    job: Job
    """As the schedule handed it out."""
    to_measure: Job
    """The same without quarantined arms."""
    repeated: bool = False
    """Another unit measures it for the table. Its rows only serve to compare the units."""


class Sweep:
    """Hands out a schedule's jobs to units and collects their rows."""

    def __init__(
        self, first: Ready, points: Sequence[Point], store: Store,
        arguments: Mapping[str, object], make_schedule: MakeSchedule,
    ) -> None:  # fmt: skip
        self.key = first.key
        self.points = tuple(points)
        # Guards use the limits that `nsa-tune probe` found on such a device.
        self.setting = replace(first.setting, limits=store.limits(self.key))
        stored = [] if arguments["fresh"] else store.current(self.key)
        wanted = bool(arguments.get("ceilings"))
        self._lacks_ceilings = wanted and lacks_ceilings(self.setting.device, stored)
        stored = [row for row in stored if row.point != CEILINGS]
        self.quarantine = Quarantine(stored)
        # Other processes may have held the memory that was missing.
        stored = [row for row in stored if not out_of_memory(row)]
        self.skipped = len(stored)
        self.schedule = make_schedule(points, self.setting, stored)
        self._units: list[str] = []
        self._nodes: dict[str, str] = {}
        shared = {} if arguments.get("sample") is None else {"shared_jobs": SHARED_BY_A_SAMPLE}
        self._agreement = DeviceAgreement([], **shared)
        self._returned: deque[Job] = deque()
        self._earlier: dict[tuple[str, str], list[Measurement]] = {}
        """By point and batch of a returned job, the rows of the units that are gone."""
        self._rows: dict[str, list[Measurement]] = {}
        self._batches: Counter[str] = Counter()
        number = store.begin_run(
            self.key, self.setting.device, {**arguments, "units": [first.unit]}
        )
        self.writer = RowWriter(store, number, self.key, self.setting.device)
        self.join(first.unit, first.node)

    def join(self, unit: str, node: str) -> None:
        """`unit` shares the work from now on. A unit that was gone keeps what it did before."""
        self._nodes[unit] = node
        if unit not in self._rows:
            self._units.append(unit)
            self._rows[unit] = []
            self._agreement.join(unit)
            self.writer.note(self._unit_of_run(unit))

    def next(self, unit: str) -> Task | None:
        """What `unit` is to measure now; None while there is nothing for it."""
        while (job := self._agreement.owed_by(unit)) is not None:
            if (to_measure := self._without_quarantined(job)) is not None:
                return Task(job, to_measure, repeated=True)
        while (job := self._next_job()) is not None:
            if (to_measure := self._without_quarantined(job)) is not None:
                self._agreement.handed_out(job, unit)
                return Task(job, to_measure)
            self._done(job, [])
        return None

    def hand_out_ceilings(self) -> bool:
        """Whether the caller is to measure the ceilings: true once, until they are given back."""
        wanted, self._lacks_ceilings = self._lacks_ceilings, False
        return wanted

    def give_back_ceilings(self) -> None:
        """The unit that was to measure the ceilings is gone: another one shall."""
        self._lacks_ceilings = True

    def _next_job(self) -> Job | None:
        return self._returned.popleft() if self._returned else self.schedule.next()

    def _without_quarantined(self, job: Job) -> Job | None:
        """`job` without its quarantined arms; None when no arm is left."""
        arms = tuple(a for a in job.arms if not self.quarantine.holds(job.point.name, a.name))
        return replace(job, arms=arms) if arms else None

    def take(
        self, unit: str, task: Task, rows: Sequence[Measurement], killed_by: str = ""
    ) -> list[Quarantined]:
        """Take some rows of `task`; returns the arms that they put into quarantine. `killed_by` is
        as in `JobUpdate`."""
        self._agreement.note(unit, rows)
        if task.repeated:
            return []
        self._rows[unit].extend(rows)
        self.writer.add(rows)
        return self.quarantine.note(rows, killed_by)

    def finished(self, unit: str, task: Task) -> list[Measurement]:
        """`task` has ended; returns all of its rows."""
        rows, self._rows[unit] = self._rows[unit], []
        if not task.repeated:
            self._batches[unit] += 1
            self._done(task.job, rows)
        # Stored with the rows, so that a run that is killed keeps it. Each time on a shared batch
        # moves what is usual, and with it all ratios.
        for other in self._units:
            self.writer.note(self._unit_of_run(other))
        return rows

    def _done(self, job: Job, rows: Sequence[Measurement]) -> None:
        """Tell the schedule all rows of `job`, also those of units that are gone."""
        earlier = self._earlier.pop((job.point.name, str(job.batch)), [])
        self.schedule.done(job, [*earlier, *rows])

    def _unit_of_run(self, unit: str) -> UnitOfRun:
        ratio = self._agreement.ratio(unit)
        return UnitOfRun(unit, self._nodes[unit], self._batches[unit], ratio)

    def give_back(self, unit: str, task: Task) -> None:
        """`unit` is gone before `task` ended: another one shall measure the arms that are left."""
        rows, self._rows[unit] = self._rows[unit], []
        if task.repeated:
            return
        measured = {row.arm for row in rows}
        arms = tuple(arm for arm in task.job.arms if arm.name not in measured)
        if not arms:
            self._done(task.job, rows)
            return
        self._earlier.setdefault((task.job.point.name, str(task.job.batch)), []).extend(rows)
        self._returned.append(replace(task.job, arms=arms))

    def left(self) -> int:
        """Jobs that are still to be handed out, as far as the schedule knows."""
        return self.schedule.remaining() + len(self._returned)

    @property
    def measured(self) -> int:
        """Rows that this run has stored."""
        return len(self.writer.stored)

    @property
    def failed(self) -> int:
        """Rows that this run has stored of arms that failed or were wrong."""
        return sum(row.status is not Status.OK for row in self.writer.stored)

    def device_reports(self) -> list[DeviceReport]:
        """What each unit did."""
        name = self.setting.device.name
        return [
            DeviceReport(**asdict(self._unit_of_run(unit)), device=name) for unit in self._units
        ]

    def spread(self) -> Spread | None:
        """How far the units are apart; None when no batch was measured by two of them."""
        return self._agreement.spread(self.setting.device.name, self.key.driver)

    def end(self, outcome: str) -> None:
        """Store how the run ended; what was measured is stored before."""
        self.writer.end(outcome)
