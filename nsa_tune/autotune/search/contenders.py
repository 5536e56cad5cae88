"""Contenders: which choices could win a batch, and what a wrong guess among them may lose.

The logarithms of arms' times are taken as normally distributed around their estimates. The arm with
the smaller estimate is chosen, and its mean loss is the expected improvement of the other arm
(Jones et al., 1998): s * phi(z) - gap * Phi(-z), where gap is the difference of the estimates, s is
its standard deviation and z = gap / s.

This ranks batches by what measuring them may gain. It is a difference of logarithms, summed over
all other choices, and so an upper bound. What a plan reports of its choices is another figure,
`costmodel.regret.expected_regret`: a relative loss against one other choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, exp, hypot, log, pi, sqrt

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.types.batch import Batch

MOST_LOST = 0.5
"""The bound where too little is measured to estimate a contender, and the highest one."""
_FARTHEST = 8.0
"""Gaps beyond this many standard deviations have no expected loss."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A choice on one batch, represented by its fastest allowed arm."""

    choice: str
    arm: str
    log_us: float | None
    """Logarithm of the estimated microseconds; None when too little of the arm is measured."""
    spread: float
    """Standard deviation of `log_us`."""


def expected_loss(gap: float, spread: float) -> float:
    """Mean loss, as a difference of logarithms, of choosing the faster one of two arms.

    The logarithm of their ratio is normal with mean `gap` and standard deviation `spread`.
    """
    if spread <= 0 or gap > _FARTHEST * spread:
        return 0.0
    z = gap / spread
    density = exp(-z * z / 2) / sqrt(2 * pi)
    return max(spread * density - gap * erfc(z / sqrt(2)) / 2, 0.0)


def contenders(policy: Policy, batch: Batch) -> dict[str, tuple[Contender, ...]]:
    """By question, its contenders on `batch`, the fastest first; questions with two or more."""
    allowed = policy.survey(batch).latencies
    estimates = policy.estimates(batch)

    def of(arm: str, choice: str) -> Contender:
        estimate = estimates.get(arm)
        if estimate is None:
            return Contender(choice, arm, None, 0.0)
        # The interval is four standard deviations wide.
        spread = log(estimate.high_us / estimate.low_us) / 4
        return Contender(choice, arm, log(estimate.latency_us), spread)

    ranked = {}
    for question in policy.point.questions:
        best = []
        for choice, arms in question.choices.items():
            allowed_arms = [of(arm, choice) for arm in arms if arm in allowed]
            if allowed_arms:
                best.append(min(allowed_arms, key=_by_time))
        if len(best) > 1:
            ranked[question.name] = tuple(sorted(best, key=_by_time))
    return ranked


def _by_time(contender: Contender) -> tuple[bool, float]:
    return contender.log_us is None, contender.log_us or 0.0


def expected_loss_bound(ranked: Sequence[Contender]) -> float:
    """Upper bound of what taking the first of `ranked` loses: summed over the others.

    `costmodel.regret.expected_regret` is another formula, of two estimates.
    """
    first = ranked[0]
    total = 0.0
    for other in ranked[1:]:
        if first.log_us is None or other.log_us is None:
            return MOST_LOST
        gap = other.log_us - first.log_us
        total += expected_loss(gap, hypot(first.spread, other.spread))
    return min(total, MOST_LOST)
