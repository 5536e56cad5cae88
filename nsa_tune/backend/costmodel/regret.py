"""Regret: what a choice costs over the best one. Nothing else computes it.

`regret` is of known times, `mean_regret` of several batches, `expected_regret` of two estimates.
(`autotune.search.contenders` has a bound of its own, of which batch is worth measuring next.)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import erf, exp, hypot, log, sqrt
from typing import TypeVar

from nsa_tune.backend.costmodel.surface import Estimate

MARGIN = 0.01
"""Choices whose times are this close, relatively, count as equal."""
NARROW = 0.002
"""The same where times are corrected by batches alike: about what times themselves are sure to."""
_WIDEST = 2.0
"""Standard deviations of a logarithm above which an estimate says nothing more."""
_CERTAIN = 1e-6
"""Standard deviations below which two estimates are taken as times."""

T = TypeVar("T", bound=Hashable)


def slowdown(times: Mapping[T, float], chosen: T) -> float:
    """Time of `chosen` over the least of `times`: 1 for the fastest."""
    return times[chosen] / min(times.values())


def regret(times: Mapping[T, float], chosen: T) -> float:
    """What `chosen` takes more than the fastest, relatively: 0 for the fastest."""
    return slowdown(times, chosen) - 1


def mean_regret(batches: Sequence[Mapping[T, float]], shares: Sequence[float], chosen: T) -> float:
    """The regret of one choice for several batches, by its times on each and the batch's share."""
    return sum(share * regret(times, chosen) for times, share in zip(batches, shares, strict=True))


def expected_regret(taken: Estimate, other: Estimate) -> float:
    """What is lost on average, relatively, by having taken the one: 0 if it is surely faster.

    The logarithm of the ratio is taken as normal, with the estimates' intervals as two deviations.
    """
    mean = log(taken.latency_us / other.latency_us)
    halves = (log(estimate.high_us / estimate.latency_us) for estimate in (taken, other))
    deviation = min(hypot(*halves) / 2, _WIDEST)
    if deviation < _CERTAIN:
        return max(exp(mean) - 1, 0.0)
    above = exp(mean + deviation**2 / 2) * _normal((mean + deviation**2) / deviation)
    return max(above - _normal(mean / deviation), 0.0)


def _normal(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


def tail_mean(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """The weighted mean of the largest values, those with `share` of the weight.

    `weighted` has pairs of a value and its weight. 0 without any weight.
    """
    left = share * sum(weight for _, weight in weighted)
    total, taken = 0.0, 0.0
    for value, weight in sorted(weighted, reverse=True):
        part = min(weight, left - taken)
        if part <= 0:
            break
        total += value * part
        taken += part
    return total / taken if taken else 0.0
