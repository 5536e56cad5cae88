"""Times of passes between those that were measured.

All ranks interpolate the same times, perhaps on hosts with different mathematical libraries. So
nothing here but +, -, *, / and exponents of two is used, which IEEE 754 defines to the last bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import floor, frexp, ldexp
from statistics import median

from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime


class Grid:
    """Times of one mode over new tokens and contexts, interpolated on log scales.

    Launching a pass takes the host as long for few tokens as for many. So all passes that waited
    for it take their median: single ones were up to half as long again.

    A pass with fewer new tokens and keys takes no longer. Where one was measured to, the host had
    something else to do.
    """

    def __init__(self, times: Sequence[PassTime]) -> None:
        rows: dict[int, dict[int, float]] = {}
        waited = [time.pass_us for time in times if time.waits]
        self.launched_us = launched_us = median(waited) if waited else 0.0
        """What passes take that wait for the host; 0 where none did."""
        took = [(time, launched_us if time.waits else time.pass_us) for time in times]
        for time, _ in took:
            larger = (
                pass_us
                for other, pass_us in took
                if other.q_tokens >= time.q_tokens and other.context >= time.context
            )
            rows.setdefault(time.q_tokens, {})[time.context] = log2(min(larger))
        self._sizes = sorted(rows)
        self._rows = [sorted(rows[size].items()) for size in self._sizes]

    def pass_us(self, q_tokens: int, context: float) -> float | None:
        """The time of a pass; None outside what was measured.

        It lies between those of the nearest sizes that were measured at such a context. Where no
        smaller one was, keys cost the nearest as much more as they cost the larger.
        """
        values = [_along(row, context) for row in self._rows]
        at = bisect_left(self._sizes, q_tokens)
        upper = next((i for i in range(at, len(values)) if values[i] is not None), None)
        above = None if upper is None else values[upper]
        if upper is None or above is None:
            return None
        if at == 0 or self._sizes[upper] == q_tokens:
            return exp2(above)
        lower = next((i for i in reversed(range(at)) if values[i] is not None), at - 1)
        below = values[lower]
        if below is None:
            longest, value = self._rows[lower][-1]
            shorter = _along(self._rows[upper], longest)
            assert shorter is not None, "a shorter context than one that was measured"
            below = min(value + above - shorter, above)
        share = _share(q_tokens, self._sizes[lower], self._sizes[upper])
        return exp2(below + share * (above - below))


_BEYOND = 1.125
"""A context up to so many times the longest that was measured takes as long as that one."""


def _along(row: list[tuple[int, float]], context: float) -> float | None:
    """The value of a grid's row at `context`: as at its start before it, none far behind it."""
    if context <= row[0][0]:
        return row[0][1]
    if context > row[-1][0]:
        return row[-1][1] if context <= _BEYOND * row[-1][0] else None
    at = bisect_left(row, context, key=lambda point: point[0])
    (low, before), (high, after) = row[at - 1], row[at]
    return before + _share(context, low, high) * (after - before)


def _share(value: float, low: float, high: float) -> float:
    """How far `value` lies from `low` to `high`, on a log scale."""
    return (log2(value) - log2(low)) / (log2(high) - log2(low))


def log2(value: float) -> float:
    """log2, a straight line between powers of two: within 0.09 of it."""
    mantissa, exponent = frexp(value)
    return exponent + 2 * (mantissa - 1)


def exp2(value: float) -> float:
    """The inverse of `log2`."""
    whole = floor(value)
    return ldexp(1 + (value - whole), whole)
