"""Times of passes between those that were measured.

All ranks interpolate the same times, perhaps on hosts with different mathematical libraries. So
nothing here but +, -, *, /, square roots and exponents of two is used, which IEEE 754 defines to
the last bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import floor, frexp, ldexp, sqrt

from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime

_BEYOND, _FAR_BEYOND = 1.125, 2.5
"""A context up to so many times the longest that was measured takes as long as that one. Up to so
many times, where the two longest are long, it takes more as the one did than the other: scoring is
all that grows."""
_LONG = 8192
"""Keys of a long context."""
_FEW = 512
"""New tokens up to which a pass grows more slowly than its tokens, as more experts are read."""

_Row = Sequence[tuple[int, float]]
"""Microseconds by context, ascending."""


class Grid:
    """Times of one mode over new tokens and contexts.

    A pass takes as long as the GPU works, and no less than its launch takes the host: as long for
    few tokens as for many. So all passes that waited for the host take their lower quartile, for
    what disturbs a host makes single ones longer, up to twice as long. What the GPU's work took in
    these is not known: less, and as much less than in larger passes as in a way that does not wait.
    Where both take nearly as long, some layers wait for the one and some for the other.

    The GPU's work grows evenly with keys, and with new tokens as it does in a way that was measured
    at closer sizes.

    A pass with fewer new tokens and keys takes no longer. Where one was measured to, the host had
    something else to do. So a pass that waited keeps the GPU at work for as long as a smaller one
    that did not, and for no longer than it took.
    """

    def __init__(
        self, times: Sequence[PassTime], growth: _Row = (), unhindered: Grid | None = None
    ) -> None:
        """A grid of `times`.

        Args:
            times: of one way.
            growth: microseconds by new tokens, ascending, of a way measured at closer sizes.
            unhindered: a way that does the same work and does not wait for the host.
        """
        self._growth = growth
        self._shared = unhindered is not None
        """Whether the GPU's work is known where a pass waited."""
        waited = sorted(time.pass_us for time in times if time.waits)
        self.launched_us = launched_us = waited[(len(waited) - 1) // 4] if waited else 0.0
        """What passes take that wait for the host; 0 where none did."""
        waiting = {(time.q_tokens, time.context) for time in times if time.waits}
        took = {
            (time.q_tokens, time.context): min(
                other.pass_us
                for other in times
                if other.q_tokens >= time.q_tokens and other.context >= time.context
            )
            for time in times
        }
        rows: dict[int, dict[int, float]] = {}
        for (size, context), us in took.items():
            least = [min(us, launched_us)]
            least += (
                fewer_us
                for (fewer, shorter), fewer_us in took.items()
                if fewer <= size and shorter <= context and (fewer, shorter) not in waiting
            )
            rows.setdefault(size, {})[context] = max(least)
        self._sizes = sorted(rows)
        self._rows = [sorted(rows[size].items()) for size in self._sizes]
        if unhindered is not None:
            self._rows = [
                self._worked(size, row, waiting, unhindered)
                for size, row in zip(self._sizes, self._rows, strict=True)
            ]

    def pass_us(self, q_tokens: int, context: float) -> float | None:
        """The time of a pass; None outside what was measured.

        It lies between those of the nearest sizes that were measured at such a context. Where no
        smaller one was, keys cost the nearest as much more as they cost the larger.
        """
        worked_us = self._between(q_tokens, context)
        if worked_us is None or not self._shared:
            return worked_us if worked_us is None else max(worked_us, self.launched_us)
        return together(worked_us, self.launched_us)

    def _between(self, q_tokens: int, context: float) -> float | None:
        values = [_along(row, context) for row in self._rows]
        at = bisect_left(self._sizes, q_tokens)
        upper = next((i for i in range(at, len(values)) if values[i] is not None), None)
        above = None if upper is None else values[upper]
        if upper is None or above is None:
            return None
        if at == 0 or self._sizes[upper] == q_tokens:
            return above
        lower = next((i for i in reversed(range(at)) if values[i] is not None), at - 1)
        below = values[lower]
        if below is None:
            longest, value = self._rows[lower][-1]
            shorter = _along(self._rows[upper], longest)
            assert shorter is not None, "a shorter context than one that was measured"
            below = min(value + above - shorter, above)
        share = self._share(q_tokens, self._sizes[lower], self._sizes[upper])
        if self._sizes[upper] > _FEW:
            return below + share * (above - below)
        return exp2(log2(below) + share * (log2(above) - log2(below)))

    def _share(self, q_tokens: int, low: int, high: int) -> float:
        """How far a pass lies from one size to another."""
        if high <= _FEW:
            return (log2(q_tokens) - log2(low)) / (log2(high) - log2(low))
        if self._growth and self._growth[0][0] <= low and high <= self._growth[-1][0]:
            at, first, last = (_along(self._growth, size) for size in (q_tokens, low, high))
            if at is not None and first is not None and last is not None and first < last:
                return min(max((at - first) / (last - first), 0.0), 1.0)
        return (q_tokens - low) / (high - low)

    def _worked(
        self, size: int, row: _Row, waiting: set[tuple[int, int]], unhindered: Grid
    ) -> list[tuple[int, float]]:
        """A row with what the GPU's work took where a pass waited, and over fewer keys."""
        worked = []
        for context, us in row:
            larger = (
                (other, [point for point in points if (other, point[0]) not in waiting])
                for other, points in zip(self._sizes, self._rows, strict=True)
                if other > size and (size, context) in waiting
            )
            for other, points in larger:
                took_us = _along(points, context) if points else None
                share = unhindered.share((size, context), (other, context))
                if took_us is not None and share is not None:
                    us = min(us, took_us * share)
                    break
            worked.append((context, us))
        first, first_us = worked[0]
        fewer = [context for context in unhindered.contexts if context < first]
        before = [
            (context, first_us * share)
            for context in fewer
            if (share := unhindered.share((size, context), (size, first))) is not None
        ]
        return before + worked

    @property
    def least_tokens(self) -> int:
        """The fewest new tokens that were measured; 0 where nothing was."""
        return self._sizes[0] if self._sizes else 0

    @property
    def contexts(self) -> list[int]:
        """All measured contexts, ascending."""
        return sorted({context for row in self._rows for context, _ in row})

    def share(self, one: tuple[int, float], other: tuple[int, float]) -> float | None:
        """The time of one pass (new tokens, context) over another's; None where one is unknown.

        Behind the longest context that all sizes were measured at, it is as there.
        """
        longest = min((row[-1][0] for row in self._rows), default=0)
        one_us, other_us = (self._between(size, min(at, longest)) for size, at in (one, other))
        return None if one_us is None or other_us is None else one_us / other_us


def _along(row: _Row, context: float) -> float | None:
    """The value of a grid's row at `context`: as at its start before it, none very far behind."""
    if context <= row[0][0]:
        return row[0][1]
    if context > row[-1][0]:
        if len(row) < 2 or row[-2][0] < _LONG or context > _FAR_BEYOND * row[-1][0]:
            return row[-1][1] if context <= _BEYOND * row[-1][0] else None
        (low, before), (high, after) = row[-2:]
        return after + (context - high) / (high - low) * max(after - before, 0.0)
    at = bisect_left(row, context, key=lambda point: point[0])
    (low, before), (high, after) = row[at - 1], row[at]
    return before + (context - low) / (high - low) * (after - before)


def together(one: float, other: float) -> float:
    """What two that run side by side take, layer by layer: 9 % more than each if they are equal."""
    less, more = (one, other) if one < other else (other, one)
    share = less / more if more else 0.0
    eighth = share * share * share * share
    return more * sqrt(sqrt(sqrt(1 + eighth * eighth)))


def log2(value: float) -> float:
    """log2, a straight line between powers of two: within 0.09 of it."""
    mantissa, exponent = frexp(value)
    return exponent + 2 * (mantissa - 1)


def exp2(value: float) -> float:
    """The inverse of `log2`."""
    whole = floor(value)
    return ldexp(1 + (value - whole), whole)
