"""When enough samples are taken: arms against the fastest of them, decided one look after another.

Arms take turns, so sample k of one and sample k of another were taken milliseconds apart, and the
logarithm of their ratio is free of what drifts. The interval of its median is distribution-free
(from the order statistics); the looks share the error, so that an arm is called slower, or equal,
wrongly in at most `ALPHA` of all cases however often one looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import comb, log, log1p
from statistics import median

from nsa_tune.autotune.bench.intervals import Timing
from nsa_tune.backend.dispatch.decide import MARGIN, Verdict

__all__ = ["ALPHA", "LOOKS", "MOST_SAMPLES", "Contest", "interval_of", "verdict_of"]

ALPHA = 0.05
"""Share of wrong verdicts over all looks together."""
LOOKS = (8, 12, 16, 24, 32, 40)
"""Samples an arm at which its interval is looked at. The last is the cap."""
MOST_SAMPLES = LOOKS[-1]
FAR = {2: 3.0, 4: 1.5, 6: 1.5}
"""Samples at which an arm that was slower by this factor in each of them is done: no noise of a
timer comes near, and such an arm is what a sweep would spend most of its time on."""
APART = 2.0
"""An arm whose median is further from its least sample than this was disturbed, and is not known to
be far: the last arm of a round is sampled twice at once, so that one hiccup hits both."""
TARGET_HALF_WIDTH = 0.005
"""An arm whose own interval is within this of its median needs no more samples for itself."""
CHEAP_US = 4000.0
"""A decided arm goes on for its own interval only until its samples have taken so long."""


@cache
def _rank(count: int, alpha: float) -> int:
    """The rank r for which the r-th smallest and largest of `count` enclose the median.

    0 when `count` is too small for 1 - `alpha`.
    """
    tail, rank = 0.0, 0
    while rank <= count // 2:
        tail += comb(count, rank) / 2.0**count
        if 2 * tail > alpha:
            break
        rank += 1
    return rank


def interval_of(values: Sequence[float], alpha: float) -> tuple[float, float] | None:
    """The distribution-free interval of the median of `values`; None when they are too few.

    The median lies outside with a probability of at most `alpha` (the sign test, turned round).
    """
    rank = _rank(len(values), alpha)
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


def verdict_of(interval: tuple[float, float] | None, margin: float = MARGIN) -> Verdict:
    """What an interval of log(arm / best) says of the two: win of the best, tie, or unsure."""
    if interval is None:
        return Verdict.UNSURE
    low, high = interval
    reach = log1p(margin)
    if low > reach or high < -reach:
        return Verdict.WIN
    return Verdict.TIE if -reach <= low and high <= reach else Verdict.UNSURE


class Contest:
    """The samples of the arms of one batch, and which arms need more."""

    def __init__(self, arms: int) -> None:
        self._samples: list[list[float]] = [[] for _ in range(arms)]
        self._verdicts = [Verdict.UNSURE] * arms
        self._active = list(range(arms))
        self._taken = 0

    @property
    def active(self) -> tuple[int, ...]:
        """Arms whose next round is wanted; none when the contest is over."""
        return tuple(self._active)

    @property
    def taken(self) -> int:
        """Samples of each active arm so far."""
        return self._taken

    def add(self, round_us: Mapping[int, tuple[float, float]]) -> None:
        """Add one round: each active arm's sample on the way forward and on the way back."""
        for arm, pair in round_us.items():
            self._samples[arm] += pair
        self._taken += 2
        best = min(self._active, key=lambda arm: median(self._samples[arm]))
        for arm in self._active:
            if arm != best:
                self._look(arm, best)
        self._active = [arm for arm in self._active if arm == best or not self._done(arm)]
        # The fastest stays as long as another is compared with it.
        if self._active == [best] and (self._precise(best) or self._taken >= MOST_SAMPLES):
            self._active = []

    def stop(self) -> None:
        """Take no more samples: the time is used up."""
        self._active = []

    def timings(self) -> list[Timing]:
        """Each arm's samples, summed up."""
        return [Timing.of(samples) for samples in self._samples]

    def verdicts(self) -> list[Verdict]:
        """How each arm stood to the fastest when it was last looked at; WIN is the fastest's."""
        return list(self._verdicts)

    def _look(self, arm: int, best: int) -> None:
        ratios = [
            log(slow / fast)
            for slow, fast in zip(self._samples[arm], self._samples[best], strict=True)
        ]
        if self._taken in FAR and min(ratios) > log(FAR[self._taken]) and self._agree(arm):
            self._verdicts[arm] = Verdict.WIN
        elif self._taken in LOOKS:
            self._verdicts[arm] = verdict_of(interval_of(ratios, ALPHA / len(LOOKS)))

    def _agree(self, arm: int) -> bool:
        ordered = sorted(self._samples[arm])
        return ordered[len(ordered) // 2] <= APART * ordered[0]

    def _done(self, arm: int) -> bool:
        if self._taken >= MOST_SAMPLES:
            return True
        if self._verdicts[arm] is Verdict.UNSURE:
            return False
        return self._taken < LOOKS[0] or self._precise(arm)

    def _precise(self, arm: int) -> bool:
        """Whether the arm's own interval is narrow, or costs too much to narrow further."""
        samples = self._samples[arm]
        if len(samples) < LOOKS[0]:
            return False
        narrow = Timing.of(samples).half_width <= TARGET_HALF_WIDTH
        return narrow or sum(samples) > CHEAP_US
