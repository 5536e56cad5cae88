"""Isolation: a station that outlives the workers that its arms kill."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.bench.ceilings import ceilings_for, failed
from nsa_tune.autotune.runner.schedule import Job
from nsa_tune.autotune.runner.station import Step
from nsa_tune.autotune.worker.messages import Answer, Hello, Refusal, Roof, Start, Work
from nsa_tune.autotune.worker.process import Died, WorkerProcess
from nsa_tune.autotune.worker.quarantine import for_inputs, with_worker
from nsa_tune.autotune.worker.recorder import Moment, Stage
from nsa_tune.backend.types.records import Measurement, Status

__all__ = ["Deadlines", "IsolatedStation"]

_MOST_VAIN = 3
"""Workers in a row that died without an arm to blame."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds without a sign of progress after which a worker is taken for hanging."""

    first: float = 180.0
    """For an arm's first touch, which may compile its kernel, and for the inputs."""
    sample: float = 30.0
    """For one launch of an arm that ran before."""
    start: float = 300.0
    """Until a worker has loaded torch and found its device."""

    def of(self, stage: Stage) -> float:
        """The deadline of `stage`."""
        return {Stage.STARTING: self.start, Stage.SAMPLE: self.sample}.get(stage, self.first)


class IsolatedStation:
    """A device whose arms run in a worker process, which is replaced when one of them breaks it."""

    def __init__(self, start: Start, deadlines: Deadlines) -> None:
        self._start = start
        self._deadlines = deadlines
        self._worker: WorkerProcess | None = WorkerProcess(start)
        self._hello: Hello | None = None
        self._greeted = False
        self._vain = 0
        self._sent_at = monotonic()
        self._arms: list[str] = []
        self._at_ceilings = False
        self.job: Job | None = None

    @property
    def connection(self) -> Connection | None:
        """As `Station`'s."""
        return None if self._worker is None else self._worker.connection

    def hello(self) -> Hello:
        """As `Station`'s.

        Raises:
            NsaTuneError: what the worker found wrong with the request or the machine.
        """
        while self._hello is None:
            if self._worker is None:
                self._worker = WorkerProcess(self._start)
            self._worker.connection.poll(1.0)
            self.advance()
        return self._hello

    def begin(self, job: Job) -> None:
        """As `Station`'s."""
        self.job = job
        self._arms = [arm.name for arm in job.arms]
        self._dispatch()

    def begin_ceilings(self) -> None:
        """As `Station`'s; a worker that dies of it is replaced before the next job."""
        self._at_ceilings = True
        self._dispatch()

    def advance(self) -> Step | None:
        """As `Station`'s.

        Raises:
            NsaTuneError: when no worker can go on.
        """
        worker = self._worker
        assert worker is not None, "a station without a job has nothing to advance"
        if not worker.connection.poll():
            return self._check_deadline(worker)
        try:
            message = worker.receive()
        except Died as death:
            return self._bury(worker.moment(), str(death))
        if isinstance(message, Refusal):
            raise message.error
        if isinstance(message, Hello):
            self._greet(message)
            return None
        return self._take(message)

    def close(self) -> None:
        """As `Station`'s."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _dispatch(self) -> None:
        """Send what is left of the job, or ask for the ceilings; a new worker where there is none,
        once it has said hello."""
        if self._worker is None:
            self._worker, self._greeted = WorkerProcess(self._start), False
        self._sent_at = monotonic()
        if self._greeted:
            self._worker.send(self._wanted())

    def _wanted(self) -> Work | Roof:
        if self._at_ceilings:
            return Roof()
        assert self.job is not None, "nothing else is begun"
        return Work(self.job.point.name, self.job.batch, tuple(self._arms))

    def _greet(self, hello: Hello) -> None:
        if self._hello is not None and self._hello.key != hello.key:
            raise MachineUnfit(
                "the driver or a library changed during the run; run the same command again "
                "to measure under the new key"
            )
        self._hello, self._greeted = hello, True
        if self.job is not None or self._at_ceilings:
            self._dispatch()

    def _take(self, answer: Answer) -> Step:
        rows = list(answer.rows)
        if self._at_ceilings:
            self._at_ceilings = False
            if answer.lost:
                self.close()
            return Step(rows, finished=True, replaced=rows[-1].reason if answer.lost else "")
        if answer.lost:
            rows = [with_worker(row) for row in rows]
            self.close()
        self._vain = 0
        return self._step(rows, rows[0].reason if answer.lost and rows else "")

    def _step(self, rows: list[Measurement], replaced: str = "") -> Step:
        over = {row.arm for row in rows}
        self._arms = [name for name in self._arms if name not in over] if over else []
        if self._arms:
            self._dispatch()
        else:
            self.job = None
        return Step(rows, finished=self.job is None, replaced=replaced)

    def _check_deadline(self, worker: WorkerProcess) -> Step | None:
        moment = worker.moment()
        since = moment.since if moment.stage is Stage.STARTING else max(moment.since, self._sent_at)
        limit = self._limit(moment.stage)
        if monotonic() - since < limit:
            return None
        worker.kill()
        return self._bury(moment, f"no end after {limit:.0f} s")

    def _limit(self, stage: Stage) -> float:
        if self._hello is not None and self._hello.setting.device.arch == "cpu":
            # A processor may need minutes for a launch that a GPU does in milliseconds.
            return self._deadlines.first
        return self._deadlines.of(stage)

    def _bury(self, moment: Moment, reason: str) -> Step | None:
        """The worker is dead: say which arm killed it, and go on with the others."""
        self.close()
        _log.info("a worker ended: %s", reason)
        if self._at_ceilings:
            return self._without_ceilings(max(moment.arm, 0), reason)
        blamed = moment.stage in (Stage.FIRST, Stage.SAMPLE)
        self._vain = 0 if blamed else self._vain + 1
        if self._vain == _MOST_VAIN or self._hello is None:
            raise MachineUnfit(
                f"the worker process ended before it touched an arm ({reason}); "
                "see nsa-tune doctor, and run the same command again to continue"
            )
        if blamed:
            rows = [with_worker(self._failed(self._arms[moment.arm], reason))]
        elif moment.stage is Stage.INPUTS:
            rows = [for_inputs(self._failed(name, reason)) for name in self._arms]
        else:
            self._dispatch()
            return None
        return self._step(rows, reason)

    def _without_ceilings(self, at: int, reason: str) -> Step:
        """Measuring the ceiling of this number killed the worker."""
        self._at_ceilings = False
        arch = self.hello().setting.device.arch
        one = ceilings_for(arch, large=arch != "cpu")[at]
        return Step([with_worker(failed(one, reason))], finished=True, replaced=reason)

    def _failed(self, arm: str, reason: str) -> Measurement:
        assert self.job is not None
        return Measurement(
            self.job.point.name, str(self.job.batch), arm, Status.FAILED, reason=reason
        )
