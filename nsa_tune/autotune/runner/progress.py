"""Progress callbacks: a run calls them to report what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
    """One sentence for people."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The same for programs; values can be written as JSON."""


class Progress(Protocol):
    """What a run calls, from its main thread."""

    def start(self, setting: Setting, key: Key, batches: int, skipped: int) -> None:
        """A sweep starts: `batches` to measure, `skipped` rows stored before. Once for each key."""
        ...

    def batch(
        self, done: int, total: int, point: Point, batch: Batch, rows: Sequence[Measurement],
        seconds: float,
    ) -> None:  # fmt: skip
        """Batch number `done` of `total` is stored, `seconds` after the start of the run."""
        ...

    def node(self, name: str, devices: int, batches: int) -> None:
        """A node of a cluster now measures with `devices`, and has measured `batches`."""
        ...

    def incident(self, incident: Incident) -> None:
        """Something unusual happened."""
        ...


class NoProgress:
    """A `Progress` that does nothing."""

    def start(self, setting: Setting, key: Key, batches: int, skipped: int) -> None:
        """Nothing."""

    def batch(
        self, done: int, total: int, point: Point, batch: Batch, rows: Sequence[Measurement],
        seconds: float,
    ) -> None:  # fmt: skip
        """Nothing."""

    def node(self, name: str, devices: int, batches: int) -> None:
        """Nothing."""

    def incident(self, incident: Incident) -> None:
        """Nothing."""
