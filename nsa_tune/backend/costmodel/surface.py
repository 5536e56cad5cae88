"""One arm's time over a point's batches: a latency model, corrected by what was measured nearby.

The model is linear in the point's features, with weights that are not negative, fitted to
relative errors. What it misses, log(measured / model), is interpolated between the measured
points of the same regime, so that a measured batch gets exactly what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import ceil, dist, exp, expm1, inf, log
from operator import mul
from typing import NamedTuple, TypeAlias

from nsa_tune.backend.costmodel.least_squares import nonnegative_weights
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Arm, FeatureFunctions, Position
from nsa_tune.backend.types.records import Measurement

_FEWEST = 3
"""Measured points that a regime needs; with fewer the arm counts as unknown there."""
_NEIGHBOURS = 6
_TRUSTS = (1.0, 0.75, 0.5, 0.25, 0.0)
_MOST_COMPARED = 2**18
"""Pairs of places that are looked at to see how well neighbours tell, at most about."""
_SAME = 1e-9
"""Octaves under which two locations are one."""
_GAP = 2.0
"""Octaves from the nearest measured place at which the measured range counts as left."""
_WIDER_OUTSIDE = 3.0
"""How much wider an interval is at once outside of the measured range; then once more an octave."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An arm's time on one batch, in microseconds, with its 95 % interval."""

    latency_us: float
    low_us: float
    high_us: float
    extrapolated: bool
    """True outside of the range that was measured."""

    def plus(self, more_us: float) -> Estimate:
        """The estimate of what takes `more_us` longer."""
        if not more_us:
            return self
        return Estimate(
            self.latency_us + more_us, self.low_us + more_us, self.high_us + more_us,
            self.extrapolated,
        )  # fmt: skip


class Places:
    """The measured locations of a regime. Arms measured on the same batches share one object."""

    def __init__(self, locations: Sequence[tuple[float, ...]]) -> None:
        self.locations = tuple(locations)
        self._low = tuple(map(min, zip(*self.locations, strict=True)))
        self._high = tuple(map(max, zip(*self.locations, strict=True)))
        # The arms of a point ask for the same location one after the other.
        self._latest: tuple[tuple[float, ...] | None, _Around] = (None, _Around(0.0, ()))

    def around(self, where: tuple[float, ...]) -> _Around:
        """The measured places that speak for `where`, with weights that sum to 1."""
        asked, answer = self._latest
        if asked is where or asked == where:
            return answer
        inside = tuple(
            [
                low if x < low else high if x > high else x
                for x, low, high in zip(where, self._low, self._high, strict=True)
            ]
        )
        ranked = self._nearest(inside)
        beyond = 0.0 if inside == where else dist(inside, where)
        outside = max(beyond, ranked[0][0] - _GAP)
        answer = _Around(outside, _weights(ranked))
        self._latest = (where, answer)
        return answer

    def _nearest(self, where: tuple[float, ...], besides: int = -1) -> list[tuple[float, int]]:
        """(distance, number) of the nearest places, the nearest first, without number `besides`."""
        away = list(map(dist, repeat(where), self.locations))
        order = sorted(range(len(away)), key=away.__getitem__)[: _NEIGHBOURS + 2]
        return [(away[i], i) for i in order if i != besides][: _NEIGHBOURS + 1]

    @cached_property
    def left_out(self) -> Mapping[int, tuple[tuple[int, float], ...]]:
        """For places spread over all, by number, the weights of the others, as if it had not been
        measured."""
        count = len(self.locations)
        return {
            i: _weights(self._nearest(self.locations[i], besides=i))
            for i in range(0, count, count * count // _MOST_COMPARED + 1)
        }


SharedPlaces: TypeAlias = dict[tuple[tuple[float, ...], ...], Places]
"""By their locations."""


class _Around(NamedTuple):
    outside: float
    """Octaves from the measured range; 0 or less within."""
    weights: tuple[tuple[int, float], ...]
    """(index of a place, weight)."""


def _weights(ranked: Sequence[tuple[float, int]]) -> tuple[tuple[int, float], ...]:
    """Inverse-distance weights of `ranked` (distance, index), nearest first.

    The last of many neighbours only sets the reach at which a weight has faded to nothing, so
    that the interpolated value does not jump where neighbours change.
    """
    if ranked[0][0] < _SAME:
        return ((ranked[0][1], 1.0),)
    reach = 1.01 * ranked[-1][0] if len(ranked) > _NEIGHBOURS else inf
    fade = 1.0 / reach
    raw = [(i, (1.0 / distance - fade) ** 2) for distance, i in ranked[:_NEIGHBOURS]]
    total = sum([weight for _, weight in raw])
    return tuple([(i, weight / total) for i, weight in raw])


class _Regime:
    """The surface of one arm on one regime."""

    def __init__(
        self, places: Places, samples: Sequence[Sequence[tuple[tuple[float, ...], Measurement]]]
    ) -> None:
        """`samples` has for each place the (features, measurement) pairs taken there."""
        flat = [pair for pairs in samples for pair in pairs]
        times = [_time(measurement) for _, measurement in flat]
        self._places = places
        self._weights = nonnegative_weights(
            [
                tuple(x / time for x in (*features, 1.0))
                for (features, _), time in zip(flat, times, strict=True)
            ]
        )
        # A model of nothing but features that are 0 on some batch would have no logarithm there.
        self._least = 0.01 * min(times)
        self._residuals = [
            sum(log(_time(m) / self._model(features)) for features, m in pairs) / len(pairs)
            for pairs in samples
        ]
        self._noise = [max(m.noise for _, m in pairs) for pairs in samples]
        self._trust = self._best_trust()
        self._rows = [[m for _, m in pairs] for pairs in samples]

    def _model(self, features: tuple[float, ...]) -> float:
        weights = self._weights
        return max(sum(map(mul, weights, features), weights[-1]), self._least)

    def estimate(self, at: Position) -> Estimate:
        """The estimated time with its interval."""
        outside, around = self._places.around(at.coordinates)
        noise = sum([weight * self._noise[i] for i, weight in around])
        # Two spreads are about 95 % if the errors are about normal.
        half = noise if len(around) == 1 else max(noise, 2 * self.spread)
        if outside > 0:
            half = max(half, 2 * self.spread) * (_WIDER_OUTSIDE + outside)
        latency_us, wide = self.latency_us(at), exp(min(half, 20.0))
        return Estimate(latency_us, latency_us / wide, latency_us * wide, outside > 0)

    def latency_us(self, at: Position) -> float:
        """The estimated time alone."""
        around, residual = self._places.around(at.coordinates).weights, 0.0
        for i, weight in around:
            residual += weight * self._residuals[i]
        if len(around) > 1:
            residual *= self._trust
        return self._model(at.features) * exp(residual)

    def rows_used(self, at: Position) -> list[tuple[Measurement, float]]:
        """The measurements at the places that the residual is interpolated from."""
        return [
            (row, weight / len(self._rows[i]))
            for i, weight in self._places.around(at.coordinates).weights
            for row in self._rows[i]
        ]

    @cached_property
    def spread(self) -> float:
        """Log error that two thirds of the places stay under when they are left out."""
        errors = sorted(abs(error) for error in self._errors(self._trust))
        return errors[ceil(0.68 * len(errors)) - 1]

    def _errors(self, trust: float) -> list[float]:
        """The log error at each place when it is left out and its neighbours are trusted so far."""
        residuals = self._residuals
        return [
            residuals[i] - trust * sum([weight * residuals[j] for j, weight in others])
            for i, others in self._places.left_out.items()
        ]

    def _best_trust(self) -> float:
        """How much of its neighbours' residual a place has, by leaving each place out.

        A residual that is smooth is interpolated whole. One that jumps from batch to batch, as
        where L2 hits depend on how rows fall on SMs, predicts little of the next one.
        """
        return min(_TRUSTS, key=lambda trust: sum([error**2 for error in self._errors(trust)]))


def _time(measurement: Measurement) -> float:
    assert measurement.latency_us is not None
    return measurement.latency_us


class Surface:
    """One arm's time over all regimes of a point."""

    def __init__(self, regimes: Mapping[int, _Regime]) -> None:
        self._regimes = dict(regimes)

    @classmethod
    def fit(
        cls,
        features: FeatureFunctions,
        arm: Arm,
        samples: Sequence[tuple[Batch, Measurement]],
        shared: SharedPlaces | None = None,
    ) -> Surface:
        """The surface through `samples`, successful measurements of `arm` in any order.

        `shared` lets the arms of one point have their places in common.
        """
        shared = {} if shared is None else shared
        columns = features.columns(arm)
        by_regime: dict[
            int, dict[tuple[float, ...], list[tuple[tuple[float, ...], Measurement]]]
        ] = {}
        for batch, measurement in sorted(samples, key=lambda sample: sample[1].batch):
            at = features.position(batch)
            pairs = by_regime.setdefault(at.regime, {}).setdefault(at.coordinates, [])
            offered = [x if i in columns else 0.0 for i, x in enumerate(at.features)]
            pairs.append((tuple(offered), measurement))
        regimes = {}
        for regime, by_place in sorted(by_regime.items()):
            if len(by_place) >= _FEWEST:
                locations = tuple(sorted(by_place))
                places = shared.setdefault(locations, Places(locations))
                regimes[regime] = _Regime(places, [by_place[where] for where in locations])
        return cls(regimes)

    def estimate(self, at: Position) -> Estimate | None:
        """The estimated time, or None in a regime where too little was measured."""
        regime = self._regimes.get(at.regime)
        return None if regime is None else regime.estimate(at)

    def latency_us(self, at: Position) -> float | None:
        """The estimated time alone, in less time."""
        regime = self._regimes.get(at.regime)
        return None if regime is None else regime.latency_us(at)

    def rows_used(self, at: Position) -> list[tuple[Measurement, float]]:
        """The measurements behind the estimate, with weights that sum to 1."""
        regime = self._regimes.get(at.regime)
        return [] if regime is None else regime.rows_used(at)

    @property
    def spread(self) -> float:
        """Relative error between measured points, by leaving each out; of the worst regime.

        Infinite where no regime has enough points.
        """
        return max((expm1(regime.spread) for regime in self._regimes.values()), default=inf)
