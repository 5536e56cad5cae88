"""Progress callbacks: a run calls them to report what it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Key, Measurement


@dataclass(frozen=True, slots=True)
class Incident:
    """Something unusual happened, and the run continues."""

    kind: str
    """"worker_replaced", "quarantined", "unit_dropped", "unit_lost", "unit_out_of_line",
    "waiting", "others_compute", "lossy_arm" or "first_call"."""
    text: str
    """One sentence."""


class Stored(NamedTuple):
    """A batch whose measurements are stored."""

    done: int
    """Which one of the run."""
    total: int
    """Batches of the run, as far as is known."""
    point: Point
    batch: Batch
    rows: Sequence[Measurement]
    seconds: float
    """After the start of the run."""


class Progress:
    """What a run calls, from its main thread. This one does nothing."""

    def start(self, setting: Setting, key: Key, batches: int, skipped: int) -> None:
        """A sweep starts: `batches` to measure, `skipped` rows stored before. Once for each key."""

    def batch(self, stored: Stored) -> None:
        """A batch is stored."""

    def incident(self, incident: Incident) -> None:
        """Something unusual happened."""


class Together(Progress):
    """Passes every call on to several others."""

    def __init__(self, *parts: Progress) -> None:
        self._parts = parts

    def start(self, setting: Setting, key: Key, batches: int, skipped: int) -> None:
        """Passed on."""
        for part in self._parts:
            part.start(setting, key, batches, skipped)

    def batch(self, stored: Stored) -> None:
        """Passed on."""
        for part in self._parts:
            part.batch(stored)

    def incident(self, incident: Incident) -> None:
        """Passed on."""
        for part in self._parts:
            part.incident(incident)
