"""The executor that survives its arms: they run in a worker process, which is replaced if it dies.

An arm may hang, call exit() inside a library or break the CUDA context. The flight recorder tells
which arm it was, and the other arms of the batch are measured in a new worker.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.worker.executor import Executor, FirstCall, JobUpdate
from nsa_tune.autotune.worker.flight_recorder import Activity, Stage
from nsa_tune.autotune.worker.messages import (
    CannotContinue,
    MeasureBatch,
    MeasureCeilings,
    Ready,
    Results,
    Setup,
)
from nsa_tune.autotune.worker.process import Died, WorkerProcess
from nsa_tune.backend.types.records import Measurement, Status

_MOST_UNEXPLAINED = 3
"""Workers in a row that may die before they touch an arm."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds without progress after which a worker counts as hung."""

    first: float = 180.0
    """For the first use of an arm, which may compile its kernel, and for making the inputs."""
    sample: float = 30.0
    """For one launch of an arm that has run before."""
    start: float = 300.0
    """For loading torch and finding the device."""

    def of(self, stage: Stage) -> float:
        """The deadline of `stage`."""
        return {Stage.STARTING: self.start, Stage.SAMPLE: self.sample}.get(stage, self.first)


class IsolatedExecutor(Executor):
    """Has a worker process for its device."""

    def __init__(self, setup: Setup, deadlines: Deadlines) -> None:
        self._setup = setup
        self._deadlines = deadlines
        self._worker: WorkerProcess | None = WorkerProcess(setup)
        self._ready: Ready | None = None
        self._accepts_work = False
        """Whether the present worker has said that it is ready."""
        self._unexplained = 0
        self._sent_at = monotonic()
        self._arms: list[str] = []
        self._at_ceilings = False
        self.name = setup.device
        self.job: Job | None = None

    @property
    def connection(self) -> Connection | None:
        return None if self._worker is None else self._worker.connection

    def arrival(self) -> Ready | None:
        if self._ready is None:
            if self._worker is None:
                self._worker = WorkerProcess(self._setup)
            self.advance()
        return self._ready

    def begin(self, job: Job) -> None:
        self.job = job
        self._arms = [arm.name for arm in job.arms]
        self._dispatch()

    def begin_ceilings(self) -> None:
        """A worker that dies of them is replaced by the next job."""
        self._at_ceilings = True
        self._dispatch()

    def advance(self) -> JobUpdate | None:
        """Raises NsaTuneError when a new worker would not get any further."""
        worker = self._worker
        assert worker is not None, "`begin` comes before `advance`"
        if not worker.connection.poll():
            return self._check_deadline(worker)
        try:
            message = worker.receive()
        except Died as death:
            return self._after_death(worker.activity(), str(death))
        if isinstance(message, CannotContinue):
            raise message.error
        if isinstance(message, Ready):
            self._note_ready(message)
            return None
        return self._update_from(message)

    def first_call(self) -> FirstCall | None:
        if self._worker is None or self.job is None:
            return None
        activity = self._worker.activity()
        # An older note is of what was asked before.
        if activity.stage is not Stage.FIRST or activity.since < self._sent_at:
            return None
        return FirstCall(self._arms[activity.arm], activity.since, self._limit(Stage.FIRST))

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _dispatch(self) -> None:
        """Ask for the ceilings, or for what is left of the job. A new worker gets the message when
        it is ready."""
        if self._worker is None:
            self._worker, self._accepts_work = WorkerProcess(self._setup), False
        self._sent_at = monotonic()
        if self._accepts_work:
            self._worker.send(self._request())

    def _request(self) -> MeasureBatch | MeasureCeilings:
        if self._at_ceilings:
            return MeasureCeilings()
        assert self.job is not None, "either ceilings or a job are in progress"
        return MeasureBatch(self.job.point.name, self.job.batch, tuple(self._arms))

    def _note_ready(self, ready: Ready) -> None:
        if self._ready is not None and self._ready.key != ready.key:
            raise MachineUnfit(
                "the driver or a library changed during the run; run the same command again "
                "to measure under the new key"
            )
        self._ready, self._accepts_work = ready, True
        if self.job is not None or self._at_ceilings:
            self._dispatch()

    def _update_from(self, results: Results) -> JobUpdate:
        rows, lost = list(results.rows), results.context_lost
        if lost:
            self.close()
        if self._at_ceilings:
            self._at_ceilings = False
            return JobUpdate(rows, finished=True, replaced=rows[-1].reason if lost else "")
        self._unexplained = 0
        # Of several rows the inputs are to blame.
        killed_by = rows[0].arm if lost and len(rows) == 1 else ""
        return self._update(rows, rows[0].reason if lost and rows else "", killed_by)

    def _update(
        self, rows: list[Measurement], replaced: str = "", killed_by: str = ""
    ) -> JobUpdate:
        """Go on with the arms that have no row, if there were any rows at all."""
        measured = {row.arm for row in rows}
        self._arms = [name for name in self._arms if name not in measured] if measured else []
        if self._arms:
            self._dispatch()
        else:
            self.job = None
        return JobUpdate(rows, self.job is None, replaced, killed_by)

    def _check_deadline(self, worker: WorkerProcess) -> JobUpdate | None:
        activity = worker.activity()
        since = activity.since
        if activity.stage is not Stage.STARTING:
            since = max(since, self._sent_at)
        limit = self._limit(activity.stage)
        if monotonic() - since < limit:
            return None
        worker.kill()
        return self._after_death(activity, f"no end after {limit:.0f} s")

    def _limit(self, stage: Stage) -> float:
        if self._ready is not None and self._ready.setting.device.arch == "cpu":
            # A launch that takes a GPU milliseconds may take a CPU minutes.
            return self._deadlines.first
        return self._deadlines.of(stage)

    def _after_death(self, activity: Activity, reason: str) -> JobUpdate | None:
        """Blame the arm that was running when the worker died, and go on with the others."""
        self.close()
        _log.info("a worker ended: %s", reason)
        if self._at_ceilings:
            # The next run measures them: this one's batches do not need them.
            self._at_ceilings = False
            return JobUpdate(finished=True, replaced=reason)
        in_arm = activity.stage in (Stage.FIRST, Stage.SAMPLE)
        self._unexplained = 0 if in_arm else self._unexplained + 1
        if self._unexplained == _MOST_UNEXPLAINED or self._ready is None:
            raise MachineUnfit(
                f"the worker process ended before it touched an arm ({reason}); "
                "see nsa-tune doctor, and run the same command again to continue"
            )
        if in_arm:
            arm = self._arms[activity.arm]
            return self._update([self._failed(arm, reason)], reason, arm)
        if activity.stage is Stage.INPUTS:
            return self._update([self._failed(name, reason) for name in self._arms], reason)
        self._dispatch()
        return None

    def _failed(self, arm: str, reason: str) -> Measurement:
        assert self.job is not None
        point, batch = self.job.point.name, str(self.job.batch)
        return Measurement(point, batch, arm, Status.FAILED, reason=reason)
