"""Measuring without isolation, in the run's own process: for debuggers and profilers."""

from __future__ import annotations

from multiprocessing.connection import Connection

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.bench.bench import Bench
from nsa_tune.autotune.runner.schedule import Job
from nsa_tune.autotune.runner.station import Step
from nsa_tune.autotune.worker.messages import Hello, Start, Work
from nsa_tune.autotune.worker.quarantine import with_worker
from nsa_tune.autotune.worker.recorder import Recorder

__all__ = ["InlineStation"]


class InlineStation:
    """A device that this process measures on. What crashes an arm crashes the run."""

    def __init__(self, start: Start) -> None:
        self._recorder = Recorder.create()
        self._bench = Bench(start, self._recorder)
        self._arms: tuple[str, ...] = ()
        self._broken_by = ""
        self._at_ceilings = False
        self.job: Job | None = None
        self.connection: Connection | None = None

    def hello(self) -> Hello:
        """As `Station`'s."""
        return self._bench.hello

    def begin(self, job: Job) -> None:
        """As `Station`'s.

        Raises:
            MachineUnfit: when an earlier job broke the device's context.
        """
        if self._broken_by:
            raise MachineUnfit(
                f"{self._broken_by} broke the CUDA context and is recorded as failed; "
                "run the same command again to continue with the next batch"
            )
        self.job = job
        self._arms = tuple(arm.name for arm in job.arms)

    def begin_ceilings(self) -> None:
        """As `Station`'s."""
        self._at_ceilings = True

    def advance(self) -> Step | None:
        """Measure the job's arms that are left, or the ceilings; returns when that is done."""
        if self._at_ceilings:
            self._at_ceilings = False
            answer = self._bench.ceilings()
            if answer.lost:
                self._broken_by = "measuring the ceilings"
            return Step(list(answer.rows), finished=True)
        assert self.job is not None, "a station without a job has nothing to advance"
        answer = self._bench.measure(Work(self.job.point.name, self.job.batch, self._arms))
        rows = [with_worker(row) if answer.lost else row for row in answer.rows]
        over = {row.arm for row in rows}
        self._arms = tuple(name for name in self._arms if name not in over)
        if answer.lost:
            self._broken_by = rows[0].arm
        if answer.lost or not over or not self._arms:
            self.job = None
        return Step(rows, finished=self.job is None)

    def close(self) -> None:
        """As `Station`'s."""
        self._recorder.close()
