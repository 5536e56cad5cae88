"""Flight recorder: what a worker is doing, in memory that outlives it."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from time import monotonic

__all__ = ["NO_ARM", "Moment", "Recorder", "Stage"]

NO_ARM = -1
_MOMENT = Struct("=dii")


class Stage(IntEnum):
    """What a worker spends its time on."""

    STARTING = 0
    IDLE = 1
    INPUTS = 2
    """The batch's tensors and their reference."""
    FIRST = 3
    """An arm is built, checked and captured: its first touch, which may compile."""
    SAMPLE = 4
    """An arm is launched once and timed."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The newest entry."""

    since: float
    """`time.monotonic()`, which all processes of a host share."""
    stage: Stage
    arm: int
    """Index into the arms of the work, or `NO_ARM`."""


class Recorder:
    """One moment, written by the worker and read by its parent, at any time and after its death.

    A note costs less than a microsecond, so that each sample can have one: a pipe would not do.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _MOMENT.size)

    @classmethod
    def create(cls) -> Recorder:
        """A new one, at the stage STARTING; its descriptor is what a child inherits."""
        descriptor = os.memfd_create("nsa-tune-recorder")
        os.ftruncate(descriptor, _MOMENT.size)
        recorder = cls(descriptor)
        recorder.note(Stage.STARTING)
        return recorder

    def note(self, stage: Stage, arm: int = NO_ARM) -> None:
        """From now on it is `stage`."""
        _MOMENT.pack_into(self._memory, 0, monotonic(), stage, arm)

    def read(self) -> Moment:
        """The newest entry."""
        since, stage, arm = _MOMENT.unpack_from(self._memory)
        return Moment(since, Stage(stage), arm)

    def close(self) -> None:
        """Give the memory back; the other side keeps its own view."""
        self._memory.close()
        os.close(self.descriptor)
