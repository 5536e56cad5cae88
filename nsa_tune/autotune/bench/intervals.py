"""Samples summed up: a median with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, sqrt
from statistics import fmean, median, stdev

__all__ = ["Timing"]

_ENOUGH = 6
"""Below, the order statistics do not reach 95 %."""
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % points of Student's t, by number of samples."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one arm, summed up. Microseconds."""

    median_us: float
    low_us: float
    high_us: float
    samples: int
    discarded: int = 0
    """Samples that were thrown away because the device was slowed down."""

    @classmethod
    def of(cls, samples_us: Sequence[float], discarded: int = 0) -> Timing:
        """Median and its 95 % interval: distribution-free, and Student's for fewer than six."""
        ordered = sorted(samples_us)
        count, middle = len(ordered), median(ordered)
        if 1 < count < _ENOUGH:
            half = _STUDENT[count] * stdev(ordered) / sqrt(count)
            mean = fmean(ordered)
            low_us = max(min(mean - half, ordered[0]), middle / 2)
            return cls(middle, low_us, max(mean + half, ordered[-1]), count, discarded)
        # Ranks n/2 -+ 0.98 sqrt(n): the normal approximation of the binomial.
        low = max(floor(count / 2 - 0.98 * sqrt(count)) - 1, 0)
        return cls(middle, ordered[low], ordered[count - 1 - low], count, discarded)

    @property
    def half_width(self) -> float:
        """Half of the interval, relative to the median."""
        return (self.high_us - self.low_us) / (2 * self.median_us)
