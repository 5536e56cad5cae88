"""Features: what a point computes of a batch in one setting, as functions of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from nsa_tune.backend.types.formula import evaluated

if TYPE_CHECKING:
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
        self.formulas = point.formulas(setting)

    @cached_property
    def regime(self) -> Callable[[Batch], int]:
        """The regime of a batch."""
        return evaluated(self.formulas, self.formulas.regime)

    @cached_property
    def features(self) -> Callable[[Batch], tuple[float, ...]]:
        """The features of a batch, in the order of a latency model's weights."""
        return evaluated(self.formulas, _tuple(self.formulas.features))

    @cached_property
    def coordinates(self) -> Callable[[Batch], tuple[float, ...]]:
        """Where a batch lies."""
        return evaluated(self.formulas, _tuple(self.formulas.coordinates.values()))

    @cached_property
    def _all(self) -> Callable[[Batch], tuple[int, tuple[float, ...], tuple[float, ...]]]:
        formulas = self.formulas
        where, features = _tuple(formulas.coordinates.values()), _tuple(formulas.features)
        return evaluated(formulas, f"({formulas.regime}, {where}, {features})")

    def position(self, batch: Batch) -> Position:
        """Regime, coordinates and features together.

        Raises:
            ArithmeticError: for a batch without tokens.
        """
        return Position(*self._all(batch))

    def by_name(self, batch: Batch) -> dict[str, float]:
        """The features of a batch, by their names."""
        return dict(zip(self.formulas.features, self.features(batch), strict=True))

    def columns(self, arm: str) -> tuple[int, ...]:
        """Which features, by number, the time of `arm` may depend on."""
        own = self.point.arm(arm).features
        names = self.formulas.features
        return tuple(i for i, name in enumerate(names) if own is None or name in own)


def _tuple(formulas: Iterable[str]) -> str:
    return f"({', '.join(formulas)},)"
