"""Sweep: everything that a run measures under one key, on one device or several equal ones."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_tune.autotune.bench.ceilings import POINT as CEILINGS
from nsa_tune.autotune.bench.ceilings import lacks_ceilings
from nsa_tune.autotune.runner.ledger import Ledger
from nsa_tune.autotune.runner.schedule import Job, MakeSchedule
from nsa_tune.autotune.runner.units import Anchors, UnitReport
from nsa_tune.autotune.worker.messages import Hello
from nsa_tune.autotune.worker.quarantine import Quarantine, Quarantined, passing
from nsa_tune.backend.types.point import Point
from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.db.store import Store

__all__ = ["Sweep", "Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """A job in the hands of a unit."""

    job: Job
    """As the schedule handed it out."""
    arms: Job
    """The same without quarantined arms."""
    anchor: bool = False
    """Another unit's job once more, to compare the two; its rows are not stored."""


class Sweep:
    """Hands out a schedule's jobs to units and takes their rows."""

    def __init__(
        self, hellos: Sequence[Hello], points: Sequence[Point], store: Store,
        arguments: Mapping[str, object], make_schedule: MakeSchedule,
    ) -> None:  # fmt: skip
        self.key = hellos[0].key
        # What a probe found on such a device bounds what is handed out.
        self.setting = replace(hellos[0].setting, limits=store.limits(self.key))
        known = [] if arguments["fresh"] else store.current(self.key)
        wanted = bool(arguments.get("ceilings"))
        self._lacks_ceilings = wanted and lacks_ceilings(self.setting.device, known)
        known = [row for row in known if row.point != CEILINGS]
        self.quarantine = Quarantine(known)
        # What failed because somebody else held the memory is tried again.
        known = [row for row in known if not passing(row)]
        self.skipped = len(known)
        self.schedule = make_schedule(points, self.setting, known)
        self._units = [hello.unit for hello in hellos]
        self._anchors = Anchors(self._units)
        self._returned: deque[Job] = deque()
        self._rows: dict[str, list[Measurement]] = {unit: [] for unit in self._units}
        self._batches: Counter[str] = Counter()
        number = store.begin_run(self.key, self.setting.device, {**arguments, "units": self._units})
        self.ledger = Ledger(store, number, self.key, self.setting.device)

    def next(self, unit: str) -> Task | None:
        """What `unit` is to measure now; None while there is nothing for it."""
        while (job := self._anchors.owed_by(unit)) is not None:
            if (arms := self._free(job)) is not None:
                return Task(job, arms, anchor=True)
        while (job := self._next_job()) is not None:
            if (arms := self._free(job)) is not None:
                self._anchors.handed_out(job, unit)
                return Task(job, arms)
            self.schedule.done(job, [])
        return None

    def hand_out_ceilings(self) -> bool:
        """Whether to measure the ceilings; once, unless that is given back."""
        wanted, self._lacks_ceilings = self._lacks_ceilings, False
        return wanted

    def give_back_ceilings(self) -> None:
        """A unit is gone before it measured them."""
        self._lacks_ceilings = True

    def _next_job(self) -> Job | None:
        return self._returned.popleft() if self._returned else self.schedule.next()

    def _free(self, job: Job) -> Job | None:
        """`job` with the arms that are not quarantined, or None when all are."""
        arms = tuple(a for a in job.arms if not self.quarantine.holds(job.point.name, a.name))
        return replace(job, arms=arms) if arms else None

    def take(self, unit: str, task: Task, rows: Sequence[Measurement]) -> list[Quarantined]:
        """Some rows of `task` are there; returns the arms that are quarantined because of them."""
        self._anchors.note(unit, rows)
        if task.anchor:
            return []
        self._rows[unit].extend(rows)
        self.ledger.note(rows)
        return self.quarantine.note(rows)

    def finished(self, unit: str, task: Task) -> list[Measurement]:
        """`task` is over; returns all of its rows."""
        rows, self._rows[unit] = self._rows[unit], []
        if not task.anchor:
            self._batches[unit] += 1
            self.schedule.done(task.job, rows)
        return rows

    def give_back(self, unit: str, task: Task) -> None:
        """`unit` is gone before it finished `task`: another one shall do what is left of it."""
        rows, self._rows[unit] = self._rows[unit], []
        over = {row.arm for row in rows}
        arms = tuple(arm for arm in task.job.arms if arm.name not in over)
        if arms and not task.anchor:
            self._returned.append(replace(task.job, arms=arms))

    def left(self) -> int:
        """Jobs that are still to be handed out, as far as that is known."""
        return self.schedule.remaining()[0] + len(self._returned)

    @property
    def measured(self) -> int:
        """Rows that are stored."""
        return len(self.ledger.stored)

    @property
    def failed(self) -> int:
        """Stored rows whose arm failed or was wrong."""
        return sum(row.status is not Status.OK for row in self.ledger.stored)

    def units(self) -> list[UnitReport]:
        """What each unit did."""
        name = self.setting.device.name
        return [
            UnitReport(unit, name, self._batches[unit], self._anchors.ratio(unit))
            for unit in self._units
        ]
