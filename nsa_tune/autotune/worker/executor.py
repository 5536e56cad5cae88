"""The interfaces of an executor, one device that measures one job at a time, and of a launcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import ClassVar, Protocol

from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.worker.messages import Ready, Setup
from nsa_tune.backend.types.records import Measurement

_POLL_S = 1.0


class DeviceLost(Exception):
    """The device is gone with its job, and may come back: `Executor.arrival` says when. The text
    is a clause that says what happened."""


@dataclass(slots=True)
class JobUpdate:
    """What an executor has achieved on its job since the last update."""

    rows: list[Measurement] = field(default_factory=list)
    finished: bool = False
    """Every arm of the job has its row."""
    replaced: str = ""
    """Why the worker process must be replaced; empty when it need not be."""
    killed_by: str = ""
    """The arm that took the worker down; empty when none did."""


@dataclass(frozen=True, slots=True)
class FirstCall:
    """The first call of an arm on a batch: its kernel may have to be compiled."""

    arm: str
    since: float
    """`time.monotonic()` when it began."""
    limit_s: float
    """Seconds after which it counts as hung."""


class Executor(Protocol):
    """One device that measures one job at a time, without blocking its caller."""

    name: str
    """What to call the device before it is ready."""
    job: Job | None
    """The job in progress."""

    def arrival(self) -> Ready | None:
        """What the device measures, once it is ready; None while it is not.

        Raises:
            NsaTuneError: what is wrong with the request or the machine.
        """

    @property
    def connection(self) -> Connection | None:
        """Becomes readable when `advance`, or before that `arrival`, has something to do; None
        when it always has."""

    def begin(self, job: Job) -> None:
        """Start to measure `job`."""

    def begin_ceilings(self) -> None:
        """Start to measure the roofline ceilings instead of a job."""

    def advance(self) -> JobUpdate | None:
        """Continue what was begun, as far as possible without waiting; None without news.

        Raises:
            DeviceLost: when the device is gone, and its job with it.
        """

    def first_call(self) -> FirstCall | None:
        """The first call of an arm that is going on; None when none is, or it cannot be seen from
        here."""
        return None

    def close(self) -> None:
        """Free the device and end the worker process."""


def wait_until_ready(executor: Executor) -> Ready:
    """What the device of `executor` measures, as soon as it is ready.

    Raises:
        NsaTuneError: what is wrong with the request or the machine.
    """
    while (ready := executor.arrival()) is None:
        if executor.connection is not None:
            executor.connection.poll(_POLL_S)
    return ready


class Launcher(Protocol):
    """Starts the executors of a run: on this host, or on the nodes of a cluster."""

    waits_for_all: ClassVar[bool]
    """Whether a run begins when all executors are ready; otherwise the first one begins."""

    def launch(self, setup: Setup) -> Sequence[Executor]:
        """Start an executor for each device, without waiting until they are ready.

        Args:
            setup: what they measure; the launcher fills in the device.

        Raises:
            MachineUnfit: when there is no device.
        """

    def close(self) -> None:
        """Free what belongs to the launcher itself; its executors are closed before."""
