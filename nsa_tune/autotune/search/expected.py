"""What a wrong choice is expected to cost: the regret that a policy's own uncertainty leaves.

Two arms' log times are taken as normal around their estimates. The one that is estimated as faster
is chosen, and what that loses on average is the expected improvement of the other one
(Jones et al., 1998): s * phi(z) - gap * Phi(-z) with z = gap / s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import erfc, exp, hypot, log, pi, sqrt

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Answer

__all__ = [
    "Calibration",
    "Contender",
    "contenders",
    "expected_loss",
    "expected_regret",
    "realised_regret",
    "tail_mean",
]

UNKNOWN_REGRET = 0.5
"""What is expected to be lost where too little is measured to compare at all."""
_FARTHEST = 8.0
"""Standard deviations beyond which nothing is lost."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One choice on one batch, by its best arm."""

    choice: str
    arm: str
    log_us: float | None
    """None where too little of the arm is measured."""
    spread: float
    """Standard deviation of `log_us`."""


def expected_loss(gap: float, spread: float) -> float:
    """Mean loss of choosing the first of two whose logs differ by `gap` +- `spread`."""
    if spread <= 0 or gap > _FARTHEST * spread:
        return 0.0
    z = gap / spread
    density = exp(-z * z / 2) / sqrt(2 * pi)
    return max(spread * density - gap * erfc(z / sqrt(2)) / 2, 0.0)


def contenders(
    policy: Policy, batch: Batch, wider: float = 1.0
) -> dict[str, tuple[Contender, ...]]:
    """Answer to its contenders on `batch`, the fastest first; only where there are two.

    `wider` scales the spreads: the policy has one for a whole surface.
    """
    allowed = policy.survey(batch).latencies
    estimates = policy.estimates(batch)

    def of(arm: str, choice: str) -> Contender:
        estimate = estimates.get(arm)
        if estimate is None:
            return Contender(choice, arm, None, 0.0)
        # Four standard deviations from end to end.
        spread = log(estimate.high_us / estimate.low_us) / 4
        return Contender(choice, arm, log(estimate.latency_us), wider * spread)

    found = {}
    for answer in policy.point.answers:
        best = []
        for choice, arms in answer.choices.items():
            open_ones = [of(arm, choice) for arm in arms if arm in allowed]
            if open_ones:
                best.append(min(open_ones, key=_by_time))
        if len(best) > 1:
            found[answer.name] = tuple(sorted(best, key=_by_time))
    return found


def _by_time(one: Contender) -> tuple[bool, float]:
    return one.log_us is None, one.log_us or 0.0


def expected_regret(ranked: Sequence[Contender]) -> float:
    """What choosing the first of `ranked` is expected to lose, at most: summed over the others."""
    first = ranked[0]
    total = 0.0
    for other in ranked[1:]:
        if first.log_us is None or other.log_us is None:
            return UNKNOWN_REGRET
        gap = other.log_us - first.log_us
        total += expected_loss(gap, hypot(first.spread, other.spread))
    return min(total, UNKNOWN_REGRET)


def realised_regret(answer: Answer, chosen: str, times_us: Mapping[str, float]) -> float | None:
    """What `chosen` (an arm) turned out to lose against the best of the answer's arms."""
    arms = [arm for names in answer.choices.values() for arm in names if arm in times_us]
    if chosen not in arms:
        return None
    return times_us[chosen] / min(times_us[arm] for arm in arms) - 1


def tail_mean(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """The mean of the largest of (value, weight) pairs that make up `share` of the weight."""
    left = share * sum(weight for _, weight in weighted)
    total, taken = 0.0, 0.0
    for value, weight in sorted(weighted, reverse=True):
        part = min(weight, left - taken)
        if part <= 0:
            break
        total += value * part
        taken += part
    return total / taken if taken else 0.0


@dataclass(slots=True)
class Calibration:
    """How expected regrets compare with those that were found where a batch was then measured."""

    prior: float = 0.1
    """Regret, expected and found, that it starts with: a few batches' worth."""
    _expected: float = field(default=0.0, init=False)
    _found: float = field(default=0.0, init=False)

    def add(self, expected: float, found: float) -> None:
        """A batch that was expected to lose `expected` was measured and loses `found`."""
        self._expected += expected
        self._found += found

    @property
    def factor(self) -> float:
        """What to multiply an expected regret by; never less than 1.

        Where a sweep looks the candidates are, on its grid, and the estimates are best there.
        """
        return max((self._found + self.prior) / (self._expected + self.prior), 1.0)
