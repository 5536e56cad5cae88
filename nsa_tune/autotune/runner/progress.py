"""Who is told how a run goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Key, Measurement

__all__ = ["Incident", "NoProgress", "Progress"]


@dataclass(frozen=True, slots=True)
class Incident:
    """Something out of the ordinary that the run survived."""

    kind: str
    """"worker_replaced", "quarantined", "unit_dropped", "unit_out_of_line" or
    "others_compute"."""
    text: str
    """One sentence."""
    facts: Mapping[str, object] = field(default_factory=dict)


class Progress(Protocol):
    """Who is told how the run goes."""

    def start(self, setting: Setting, key: Key, batches: int, skipped: int) -> None:
        """`batches` are to be measured; `skipped` rows were there already. Once for each key."""
        ...

    def batch(
        self, done: int, total: int, point: Point, batch: Batch, rows: Sequence[Measurement],
        seconds: float,
    ) -> None:  # fmt: skip
        """Batch number `done` is stored; `seconds` since the start."""
        ...

    def incident(self, incident: Incident) -> None:
        """Something went wrong, and the run goes on."""
        ...


class NoProgress:
    """Tells nobody."""

    def start(self, setting: Setting, key: Key, batches: int, skipped: int) -> None:
        """Nothing."""

    def batch(
        self, done: int, total: int, point: Point, batch: Batch, rows: Sequence[Measurement],
        seconds: float,
    ) -> None:  # fmt: skip
        """Nothing."""

    def incident(self, incident: Incident) -> None:
        """Nothing."""
