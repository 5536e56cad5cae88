"""The executor without a worker process, for debuggers and profilers (`run --no-isolate`)."""

from __future__ import annotations

from multiprocessing.connection import Connection

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.worker.executor import Executor, JobUpdate
from nsa_tune.autotune.worker.flight_recorder import FlightRecorder
from nsa_tune.autotune.worker.messages import MeasureBatch, Ready, Setup
from nsa_tune.autotune.worker.server import MeasurementServer


class InProcessExecutor(Executor):
    """Measures in this process: an arm that crashes ends the run."""

    connection: Connection | None = None

    def __init__(self, setup: Setup) -> None:
        self._recorder = FlightRecorder.create()
        self._server = MeasurementServer(setup, self._recorder)
        self._arms: tuple[str, ...] = ()
        self._broken_by = ""
        self._at_ceilings = False
        self.name = setup.device
        self.job: Job | None = None

    def arrival(self) -> Ready | None:
        return self._server.ready

    def begin(self, job: Job) -> None:
        """Raises MachineUnfit when an earlier job broke the device's context."""
        if self._broken_by:
            raise MachineUnfit(
                f"{self._broken_by} broke the CUDA context and is recorded as failed; "
                "run the same command again to continue with the next batch"
            )
        self.job = job
        self._arms = tuple(arm.name for arm in job.arms)

    def begin_ceilings(self) -> None:
        self._at_ceilings = True

    def advance(self) -> JobUpdate | None:
        """Measure the ceilings, or the arms of the job that have no row; returns when done."""
        if self._at_ceilings:
            self._at_ceilings = False
            results = self._server.measure_ceilings()
            if results.context_lost:
                self._broken_by = "measuring the ceilings"
            return JobUpdate(list(results.rows), finished=True)
        assert self.job is not None, "`begin` comes before `advance`"
        results = self._server.measure(
            MeasureBatch(self.job.point.name, self.job.batch, self._arms)
        )
        rows = list(results.rows)
        measured = {row.arm for row in rows}
        self._arms = tuple(name for name in self._arms if name not in measured)
        if results.context_lost:
            self._broken_by = rows[0].arm
        if results.context_lost or not measured or not self._arms:
            self.job = None
        return JobUpdate(rows, finished=self.job is None)

    def close(self) -> None:
        self._recorder.close()
