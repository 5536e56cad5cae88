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
from math import erfc, exp, hypot, inf, log, pi, sqrt

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.types.batch import Batch

MOST_LOST = 0.5
"""The bound where too little is measured to estimate a contender, and the highest one."""
_FARTHEST = 8.0
"""Gaps beyond this many standard deviations have no expected loss."""


def expected_loss(gap: float, spread: float) -> float:
    """Mean loss, as a difference of logarithms, of choosing the faster one of two arms.

    The logarithm of their ratio is normal with mean `gap` and standard deviation `spread`.
    """
    if spread <= 0 or gap > _FARTHEST * spread:
        return 0.0
    z = gap / spread
    density = exp(-z * z / 2) / sqrt(2 * pi)
    return max(spread * density - gap * erfc(z / sqrt(2)) / 2, 0.0)


def contenders(policy: Policy, batch: Batch) -> dict[str, list[Estimate | None]]:
    """By question, estimates of its choices on `batch`, each of its fastest allowed arm: the
    fastest first, and None, of which too little is measured, last; questions with two or more."""
    allowed = policy.survey(batch).latencies
    estimates = policy.estimates(batch)
    ranked = {}
    for question in policy.point.questions:
        best = []
        for arms in question.choices.values():
            of_arms = [estimates.get(arm) for arm in arms if arm in allowed]
            if of_arms:
                best.append(min(of_arms, key=_time))
        if len(best) > 1:
            ranked[question.name] = sorted(best, key=_time)
    return ranked


def _time(estimate: Estimate | None) -> float:
    return inf if estimate is None else estimate.latency_us


def expected_loss_bound(ranked: Sequence[Estimate | None]) -> float:
    """Upper bound of what taking the first of `ranked` loses: summed over the others.

    `costmodel.regret.expected_regret` is another formula, of two estimates.
    """
    first, *others = ranked
    total = 0.0
    for other in others:
        if first is None or other is None:
            return MOST_LOST
        gap = log(other.latency_us) - log(first.latency_us)
        total += expected_loss(gap, hypot(_deviation(first), _deviation(other)))
    return min(total, MOST_LOST)


def _deviation(estimate: Estimate) -> float:
    """Of the time's logarithm: the interval is four of them wide."""
    return log(estimate.high_us / estimate.low_us) / 4
