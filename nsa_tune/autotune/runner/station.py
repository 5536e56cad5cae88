"""What a run asks of a device: one job at a time, and word of what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol

from nsa_tune.autotune.runner.schedule import Job
from nsa_tune.autotune.worker.messages import Hello
from nsa_tune.backend.types.records import Measurement

__all__ = ["Station", "Step"]


@dataclass(slots=True)
class Step:
    """What a station has to tell about its job."""

    rows: list[Measurement] = field(default_factory=list)
    """New since the last step."""
    finished: bool = False
    """No arm of the job is left."""
    replaced: str = ""
    """Why the worker had to be replaced; empty when it had not."""


class Station(Protocol):
    """One device that measures one job at a time."""

    def hello(self) -> Hello:
        """Wait until the device is ready, and say what it is."""
        ...

    @property
    def job(self) -> Job | None:
        """What it is measuring."""
        ...

    @property
    def connection(self) -> Connection | None:
        """What becomes readable when there is something to `advance`; None: there is always."""
        ...

    def begin(self, job: Job) -> None:
        """Measure `job`."""
        ...

    def begin_ceilings(self) -> None:
        """Measure what the device itself reaches, in place of a job."""
        ...

    def advance(self) -> Step | None:
        """Go on with what was begun as far as that is possible without waiting."""
        ...

    def close(self) -> None:
        """End what was started for this station."""
        ...
