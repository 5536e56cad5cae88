"""Residuals: what latency models miss, from measured batches of which kernels make alike work.

Gaussian-process regression of log(measured / model), for all arms of a regime at once. Two batches
are as alike as the logarithms of their features are near, each as a part of how much it varies; an
exponential kernel with a long reach joins the measured ones about by straight lines, and its length
matters little.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import dist, exp, log1p, sqrt
from operator import mul
from statistics import pstdev
from typing import Any, TypeAlias

_REACH = 8.0
"""Distance, in deviations of the features' logarithms, at which two batches have 1/e in common."""
_LEAST_SPREAD = 0.2
"""Added to a deviation: a feature that hardly varies must not tell batches apart."""
_NOISE = 0.04
"""Variance of a residual by itself, as a part of that of all."""
_MOST = 500
"""Batches that are compared with; solving takes the cube of that, once."""

_Vector: TypeAlias = Sequence[float]


@dataclass(frozen=True)
class Residuals:
    """What the models of a regime's arms miss."""

    features: Mapping[str, tuple[float, ...]]
    """By batch."""
    by_arm: Mapping[str, Mapping[str, float]]
    """By arm and batch, log(measured / model)."""

    def corrections(self, features: _Vector) -> dict[str, float]:
        """By arm, the logarithm of the factor that its model's time is to be taken by."""
        where = self._where(features)
        # Not imported for it: an engine has it, and saves most of a plan's time by it.
        if (numpy := sys.modules.get("numpy")) is not None:
            places, weights = self._arrays
            near = numpy.exp(numpy.sqrt(numpy.square(places - where).sum(axis=1)) / -_REACH)
            return dict(zip(self._weights, (weights @ near).tolist(), strict=True))
        alike = [exp(-dist(where, place) / _REACH) for place in self._places.values()]
        return {arm: sum(map(mul, weights, alike)) for arm, weights in self._weights.items()}

    def _where(self, features: _Vector) -> tuple[float, ...]:
        return tuple(map(mul, map(log1p, features), self._scales))

    @cached_property
    def _scales(self) -> list[float]:
        logs = zip(*(map(log1p, features) for features in self.features.values()), strict=True)
        return [1 / (pstdev(column) + _LEAST_SPREAD) for column in logs]

    @cached_property
    def _places(self) -> Mapping[str, tuple[float, ...]]:
        texts = sorted(self.features)[:: len(self.features) // _MOST + 1]
        return {text: self._where(self.features[text]) for text in texts}

    @cached_property
    def _arrays(self) -> tuple[Any, Any]:
        """Places and weights as arrays of numpy."""
        array = sys.modules["numpy"].array
        return array(list(self._places.values())), array(list(self._weights.values()))

    @cached_property
    def _weights(self) -> Mapping[str, list[float]]:
        """By arm, one for each place, 0 where it was not measured."""
        factors: dict[tuple[str, ...], list[list[float]]] = {}
        found = {}
        for arm, residuals in self.by_arm.items():
            texts = tuple(text for text in self._places if text in residuals)
            if texts not in factors:
                factors[texts] = _factor([self._places[text] for text in texts])
            solved = _solved(factors[texts], [residuals[text] for text in texts])
            weights = dict(zip(texts, solved, strict=True))
            found[arm] = [weights.get(text, 0.0) for text in self._places]
        return found


def _factor(places: Sequence[_Vector]) -> list[list[float]]:
    """The rows of the Cholesky factor of the places' covariance."""
    rows: list[list[float]] = []
    for i, place in enumerate(places):
        row: list[float] = []
        for j in range(i):
            known = sum(map(mul, row, rows[j]))
            row.append((exp(-dist(place, places[j]) / _REACH) - known) / rows[j][j])
        row.append(sqrt(1.0 + _NOISE - sum(map(mul, row, row))))
        rows.append(row)
    return rows


def _solved(factor: Sequence[_Vector], right: _Vector) -> list[float]:
    forward: list[float] = []
    for row, value in zip(factor, right, strict=True):
        forward.append((value - sum(map(mul, row, forward))) / row[-1])
    for i in reversed(range(len(forward))):
        row = factor[i]
        forward[i] /= row[-1]
        for j in range(i):
            forward[j] -= row[j] * forward[i]
    return forward
