"""A job: one batch of one decision point, with the arms to time against each other on it."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Arm, Point


@dataclass(frozen=True, slots=True)
class Job:
    """One batch to measure. A schedule hands it out, and one device measures it."""

    point: Point
    batch: Batch
    arms: tuple[Arm, ...]
