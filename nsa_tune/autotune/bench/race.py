"""A race of the arms of one batch: sample them in turns until each is known slower or equal.

It is a sequential test. Sample k of one arm and sample k of another are taken milliseconds apart,
so a clock that drifts cancels out of the logarithm of their ratio. After 8, 12, 16, ... samples the
race looks at the interval of that logarithm's median, and an arm that is clearly slower than the
fastest, or equal to it, may leave. The looks share one error probability (Bonferroni): at most
`ALPHA` of all verdicts are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log, log1p
from statistics import median

from nsa_tune.autotune.bench.intervals import Timing, interval_of
from nsa_tune.backend.costmodel.regret import MARGIN
from nsa_tune.backend.dispatch.decide import Verdict

ALPHA = 0.05
"""Probability of a wrong verdict on an arm, over all looks together."""
LOOKS = (8, 12, 16, 24, 32, 40)
"""Samples of each arm after which its interval is looked at; the last is the most samples."""
MOST_SAMPLES = LOOKS[-1]
FAR = {2: 3.0, 4: 1.5, 6: 1.5}
"""Number of samples to a factor: an arm leaves when it was slower by that factor in every sample.
No timer is that noisy, and sampling such arms fully would take most of a sweep's time."""
APART = 2.0
"""`FAR` does not hold for an arm whose median is over this factor of its least sample: something
disturbed it. (The last arm of a round is sampled twice in a row, and one hiccup can hit both.)"""
TARGET_HALF_WIDTH = 0.005
"""An arm with a verdict may leave when half of its interval is below this share of its median."""
CHEAP_US = 4000.0
"""An arm with a verdict leaves in any case when its samples have taken this long together."""


def verdict_of(interval: tuple[float, float] | None) -> Verdict:
    """The verdict on an arm from the interval of log(its time / the fastest's time).

    WIN means that the fastest wins, or that this arm does; TIE that they are within `MARGIN`.
    """
    if interval is None:
        return Verdict.UNSURE
    low, high = interval
    reach = log1p(MARGIN)
    if low > reach or high < -reach:
        return Verdict.WIN
    return Verdict.TIE if -reach <= low and high <= reach else Verdict.UNSURE


class Race:
    """The samples of the arms of one batch, and which arms need more. Arms go by their index."""

    def __init__(self, arms: int) -> None:
        self._samples: list[list[float]] = [[] for _ in range(arms)]
        self._verdicts = [Verdict.UNSURE] * arms
        self._active = list(range(arms))
        self._taken = 0

    @property
    def active(self) -> tuple[int, ...]:
        """Arms to sample in the next round; none when the race is over."""
        return tuple(self._active)

    @property
    def taken(self) -> int:
        """Samples that each active arm has."""
        return self._taken

    def add(self, round_us: Mapping[int, tuple[float, float]]) -> None:
        """Add one round: for each active arm the sample of the forward and of the reverse order."""
        for arm, pair in round_us.items():
            self._samples[arm] += pair
        self._taken += 2
        best = min(self._active, key=lambda arm: median(self._samples[arm]))
        for arm in self._active:
            if arm != best:
                self._look(arm, best)
        self._active = [arm for arm in self._active if arm == best or not self._done(arm)]
        # The fastest stays in the race while another is compared with it.
        if self._active == [best] and (self._precise(best) or self._taken >= MOST_SAMPLES):
            self._active = []

    def stop(self) -> None:
        """End the race: its time is used up."""
        self._active = []

    def timings(self) -> list[Timing]:
        """Median and interval of each arm."""
        return [Timing.of(samples) for samples in self._samples]

    def verdicts(self) -> list[Verdict]:
        """Each arm's verdict when it was last compared with the fastest; UNSURE if it never was."""
        return list(self._verdicts)

    def _look(self, arm: int, best: int) -> None:
        ratios = [
            log(slow / fast)
            for slow, fast in zip(self._samples[arm], self._samples[best], strict=True)
        ]
        if self._taken in FAR and min(ratios) > log(FAR[self._taken]) and self._undisturbed(arm):
            self._verdicts[arm] = Verdict.WIN
        elif self._taken in LOOKS:
            self._verdicts[arm] = verdict_of(interval_of(ratios, ALPHA / len(LOOKS)))

    def _undisturbed(self, arm: int) -> bool:
        ordered = sorted(self._samples[arm])
        return ordered[len(ordered) // 2] <= APART * ordered[0]

    def _done(self, arm: int) -> bool:
        if self._taken >= MOST_SAMPLES:
            return True
        if self._verdicts[arm] is Verdict.UNSURE:
            return False
        return self._taken < LOOKS[0] or self._precise(arm)

    def _precise(self, arm: int) -> bool:
        """Whether the arm's own interval is narrow, or takes too long to narrow further."""
        samples = self._samples[arm]
        if len(samples) < LOOKS[0]:
            return False
        narrow = Timing.of(samples).half_width <= TARGET_HALF_WIDTH
        return narrow or sum(samples) > CHEAP_US
