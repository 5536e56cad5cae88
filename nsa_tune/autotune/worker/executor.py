"""The interface of an executor: one device that measures one job at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol

from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.worker.messages import Ready
from nsa_tune.backend.types.records import Measurement

__all__ = ["Executor", "JobUpdate"]


@dataclass(slots=True)
class JobUpdate:
    """What an executor has achieved on its job since the last update."""

    rows: list[Measurement] = field(default_factory=list)
    finished: bool = False
    """Every arm of the job has its row."""
    replaced: str = ""
    """Why the worker process must be replaced; empty when it need not be."""


class Executor(Protocol):
    """One device that measures one job at a time, without blocking its caller."""

    def ready(self) -> Ready:
        """Wait until the device is ready to measure."""
        ...

    @property
    def job(self) -> Job | None:
        """The job in progress."""
        ...

    @property
    def connection(self) -> Connection | None:
        """Becomes readable when `advance` has something to do; None when it always has."""
        ...

    def begin(self, job: Job) -> None:
        """Start to measure `job`."""
        ...

    def begin_ceilings(self) -> None:
        """Start to measure the roofline ceilings instead of a job."""
        ...

    def advance(self) -> JobUpdate | None:
        """Continue what was begun, as far as possible without waiting; None without news."""
        ...

    def close(self) -> None:
        """Free the device and end the worker process."""
        ...
