"""Intervals of the median: distribution-free, from order statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, floor, sqrt
from statistics import fmean, median, stdev

from nsa_tune.backend.types.records import Measurement, Status

_ENOUGH = 6
"""Samples for a 95 % interval by order statistics; fewer do not reach 95 %."""
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % points of Student's t, by number of samples."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The samples of one arm in short. Times are microseconds."""

    median_us: float
    low_us: float
    """Lower end of the median's 95 % interval."""
    high_us: float
    samples: int
    discarded: int = 0
    """Samples that were thrown away because the device was slowed down."""

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Timing:
        """Median and its 95 % interval: by order statistics, by Student's t for fewer than six."""
        ordered = sorted(samples_us)
        count, middle = len(ordered), median(ordered)
        if 1 < count < _ENOUGH:
            half = _STUDENT[count] * stdev(ordered) / sqrt(count)
            mean = fmean(ordered)
            low_us = max(min(mean - half, ordered[0]), middle / 2)
            return cls(middle, low_us, max(mean + half, ordered[-1]), count)
        # Ranks n/2 -+ 0.98 sqrt(n): the normal approximation of the binomial.
        low = max(floor(count / 2 - 0.98 * sqrt(count)) - 1, 0)
        return cls(middle, ordered[low], ordered[count - 1 - low], count)

    @property
    def half_width(self) -> float:
        """Half of the interval, relative to the median."""
        return (self.high_us - self.low_us) / (2 * self.median_us)

    def row(
        self, point: str, batch: str, arm: str, error: float | None = None,
        pass_us: float | None = None,
    ) -> Measurement:  # fmt: skip
        """The row of an arm that took this time on a batch."""
        return Measurement(
            point, batch, arm, Status.OK, self.median_us, self.low_us, self.high_us, self.samples,
            error, discarded=self.discarded, pass_us=pass_us,
        )  # fmt: skip


def interval_of(values: Sequence[float], alpha: float) -> tuple[float, float] | None:
    """The interval that holds the median of `values` but for a probability of `alpha`.

    It inverts the sign test, exactly. None when `values` are too few for that `alpha`.
    """
    rank = _rank(len(values), alpha)
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


@cache
def _rank(count: int, alpha: float) -> int:
    """The rank r for which the r-th smallest and the r-th largest of `count` enclose the median.

    0 when `count` is too small for 1 - `alpha`.
    """
    tail, rank = 0.0, 0
    while rank <= count // 2:
        tail += comb(count, rank) / 2.0**count
        if 2 * tail > alpha:
            break
        rank += 1
    return rank
