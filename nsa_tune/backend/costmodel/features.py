"""Features: what a point computes of a batch in one setting, as functions of the batch."""

from __future__ import annotations

from typing import NamedTuple

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Setting


class Position(NamedTuple):
    """All that a surface knows of a batch."""

    regime: int
    coordinates: tuple[float, ...]
    """In octaves."""
    features: tuple[float, ...]


class Features:
    """The functions of one point in one setting."""

    def __init__(self, point: Point, setting: Setting) -> None:
        self.point = point
        self.setting = setting
        functions = point.features(setting)
        self.names = functions.names
        self.features = functions.features
        self.coordinates = functions.coordinates
        self.regime = functions.regime

    def position(self, batch: Batch) -> Position:
        """Regime, coordinates and features together.

        Raises:
            ArithmeticError: for a batch without tokens.
        """
        return Position(self.regime(batch), self.coordinates(batch), self.features(batch))

    def by_name(self, batch: Batch) -> dict[str, float]:
        """The features of a batch, by their names."""
        return dict(zip(self.names, self.features(batch), strict=True))

    def columns(self, arm: str) -> tuple[int, ...]:
        """Which features, by number, the time of `arm` may depend on."""
        offered = self.point.arm(arm).features
        return tuple(i for i, name in enumerate(self.names) if offered is None or name in offered)
