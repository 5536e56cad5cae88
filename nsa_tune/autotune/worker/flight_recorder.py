"""Flight recorder: what a worker is doing, in shared memory that outlives it.

When a worker dies, its parent reads here which arm it was running.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from time import monotonic

NO_ARM = -1
_RECORD = Struct("=dii")


class Stage(IntEnum):
    """What a worker is doing."""

    STARTING = 0
    IDLE = 1
    INPUTS = 2
    """Making a batch's tensors and their reference output."""
    FIRST = 3
    """Building, checking and capturing an arm: its first use, which may compile."""
    SAMPLE = 4
    """Launching an arm once to time it."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker is doing, and since when."""

    since: float
    """`time.monotonic()`, which all processes of a host share."""
    stage: Stage
    arm: int
    """Index into the arms of the batch, or `NO_ARM`."""


class FlightRecorder:
    """The newest activity, written by the worker, read by its parent, also after its death.

    A note takes less than a microsecond, so every sample can have one; through a pipe it would take
    longer than many kernels.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _RECORD.size)

    @classmethod
    def create(cls) -> FlightRecorder:
        """A new one at stage STARTING. A child process inherits its `descriptor`."""
        descriptor = os.memfd_create("nsa-tune-recorder")
        os.ftruncate(descriptor, _RECORD.size)
        recorder = cls(descriptor)
        recorder.note(Stage.STARTING)
        return recorder

    def note(self, stage: Stage, arm: int = NO_ARM) -> None:
        """Write that `stage` begins now."""
        _RECORD.pack_into(self._memory, 0, monotonic(), stage, arm)

    def read(self) -> Activity:
        """The newest activity."""
        since, stage, arm = _RECORD.unpack_from(self._memory)
        return Activity(since, Stage(stage), arm)

    def close(self) -> None:
        """Free this side's view; the other process keeps its own."""
        self._memory.close()
        os.close(self.descriptor)
