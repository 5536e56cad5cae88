"""Progress callbacks: a run calls them to report what it does."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Key, Measurement

_WINDOW = 24
"""Batches whose pace is taken for that of the rest of a run."""
_FEWEST = 8
"""Batches before which a pace means nothing."""
_LONGEST = 5.0
"""A pause counts as at most so many times the median one: a batch that waited for a kernel to
compile says nothing of the others."""


class RemainingTime:
    """Estimates how long a run still takes, from the pace of its latest batches.

    The first batches load torch and compile kernels, so that the mean over a whole run is many
    times too high.
    """

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=_WINDOW + 1)

    def add(self, seconds: float) -> None:
        """A batch has ended, `seconds` after the start of the run."""
        self._ends_s.append(seconds)

    def estimate_s(self, batches: int) -> float | None:
        """Seconds that `batches` more batches take; None while too few have ended."""
        pauses = [end - begin for begin, end in pairwise(self._ends_s)]
        if len(pauses) < _FEWEST:
            return None
        # Batches of several devices may be stored together, without a pause between them.
        longest = _LONGEST * median([pause for pause in pauses if pause > 0] or [0.0])
        return batches * fmean(min(pause, longest) for pause in pauses)


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
