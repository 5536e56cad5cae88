"""Verdicts: which choice answers a question, how sure that is, and why the others do not.

Guards come first, the estimates next, the winner last. `pick` is the part that costs time at run
time; `decide` gives the same choice with everything that a reader wants to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, hypot, log
from typing import TYPE_CHECKING

from nsa_tune.backend.surface import Estimate

if TYPE_CHECKING:
    from nsa_tune.backend.batch import Batch
    from nsa_tune.backend.point import Answer, Setting
    from nsa_tune.backend.policy import Policy, Survey

__all__ = ["MARGIN", "Choice", "Verdict", "decide", "decide_for_all", "pick"]

MARGIN = 0.01
"""Choices whose times are this close, relatively, count as equal."""


class Verdict(StrEnum):
    """How a choice came about."""

    WIN = "win"
    """Faster than every other by more than the margin, at the far ends of the intervals too."""
    TIE = "tie"
    """Within the margin of another; the stable default of those was taken."""
    UNSURE = "unsure"
    """Estimated as fastest, but the intervals leave room for another."""
    ONLY = "only"
    """Every other choice is forbidden."""
    RULE = "rule"
    """Too little is measured to compare: the engine's own rule, or what is allowed instead."""
    FORCED = "forced"
    """Follows from the batch and the other choices; there is nothing to tune."""
    NONE = "none"
    """Every choice is forbidden: there is no answer, and the engine keeps its own."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer to one question for one batch."""

    answer: str
    """Name of the question."""
    choice: str | None
    verdict: Verdict
    estimates: Mapping[str, Estimate]
    """Choice to the estimate of its best allowed arm; only those that have one."""
    arms: Mapping[str, str]
    """Choice to its best allowed arm; only allowed ones."""
    forbidden: Mapping[str, str]
    """Choice to why it must not be taken."""
    default: str
    """What the engine's rule takes."""
    tied: tuple[str, ...] = ()
    """The choices of a tie, the taken one among them."""


def decide(answer: Answer, policy: Policy, batch: Batch, setting: Setting, default: str) -> Choice:
    """The answer to `answer` for `batch`; `default` is what the engine's rule would take."""
    survey = policy.survey(batch)
    choice, verdict = pick(answer, survey, default)
    every = policy.estimates(batch)
    arms = _best_arms(answer, survey)
    estimates = {name: every[arm] for name, arm in arms.items() if arm in every}
    tied: tuple[str, ...] = ()
    if verdict is Verdict.TIE:
        tied = _tied({name: estimate.latency_us for name, estimate in estimates.items()})
    elif verdict is Verdict.UNSURE and choice is not None:
        ahead = (_least_ratio(estimates[choice], estimates[o]) for o in estimates if o != choice)
        if min(ahead) > 1 + MARGIN:
            verdict = Verdict.WIN
    forbidden = _forbidden(answer, policy, survey, batch, setting)
    return Choice(answer.name, choice, verdict, estimates, arms, forbidden, default, tied)


def pick(answer: Answer, survey: Survey, default: str) -> tuple[str | None, Verdict]:
    """The choice, and its verdict but for WIN: a winner by estimate is UNSURE here."""
    latencies = survey.latencies
    allowed: list[str] = []
    costs: dict[str, float] = {}
    for choice, arms in answer.choices.items():
        best, is_open = None, False
        for arm in arms:
            if arm in latencies:
                is_open = True
                latency_us = latencies[arm]
                if latency_us is not None and (best is None or latency_us < best):
                    best = latency_us
        if is_open:
            allowed.append(choice)
        if best is not None:
            costs[choice] = best
    return _settle(answer, (survey,), allowed, costs, default)


def _settle(
    answer: Answer,
    surveys: Sequence[Survey],
    allowed: Sequence[str],
    costs: Mapping[str, float],
    default: str,
) -> tuple[str | None, Verdict]:
    """The choice among `allowed` (in declared order), by `costs` where two of them have one."""
    if len(allowed) == 1 and (costs or default in answer.choices):
        return allowed[0], Verdict.ONLY
    if len(costs) >= 2:
        tied = _tied(costs)
        if len(tied) == 1:
            return tied[0], Verdict.UNSURE
        return (default if default in tied else tied[0]), Verdict.TIE
    if default in allowed:
        return default, Verdict.RULE
    # A rule may name what this point has no arm for on this device (a kernel that nobody
    # declared). No guard speaks against that, so it stands, unless every known way is forbidden.
    known = [choice for choice in answer.choices if _stands(answer, surveys, choice)]
    if default not in known and (allowed or not known):
        return default, Verdict.RULE
    if allowed:
        return next(iter(costs), allowed[0]), Verdict.RULE
    return None, Verdict.NONE


def _stands(answer: Answer, surveys: Sequence[Survey], choice: str) -> bool:
    """Whether a survey knows an arm of `choice`, allowed or not."""
    return any(
        arm in standing
        for survey in surveys
        for standing in survey
        for arm in answer.choices[choice]
    )


def _tied(costs: Mapping[str, float]) -> tuple[str, ...]:
    limit = min(costs.values()) * (1 + MARGIN)
    return tuple([choice for choice, cost in costs.items() if cost <= limit])


def _best_arms(answer: Answer, survey: Survey) -> dict[str, str]:
    """Each allowed choice's fastest allowed arm; the first declared where none has a time."""
    best: dict[str, str] = {}
    for choice, arms in answer.choices.items():
        open_arms = [arm for arm in arms if arm in survey.latencies]
        timed = [(t, arm) for arm in open_arms if (t := survey.latencies[arm]) is not None]
        if timed:
            # On equal times the first declared, as `min` keeps the first.
            best[choice] = min(timed, key=lambda pair: pair[0])[1]
        elif open_arms:
            best[choice] = open_arms[0]
    return best


def _least_ratio(best: Estimate, other: Estimate) -> float:
    """The low end of the interval of other / best; the two errors are independent."""
    down = log(other.latency_us / other.low_us)
    up = log(best.high_us / best.latency_us)
    return other.latency_us / best.latency_us * exp(-hypot(down, up))


def _forbidden(
    answer: Answer, policy: Policy, survey: Survey, batch: Batch, setting: Setting
) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for choice, names in answer.choices.items():
        if any(name in survey.latencies for name in names):
            continue
        why = {**survey.refused, **survey.failed}
        found = [why[name] for name in names if name in why]
        if not found:
            # None of its arms fits this device and layout, or all are references that a kernel
            # stands for; only the former is worth a word.
            texts = (policy.point.arm(name).allowed(batch, setting) for name in names)
            found = [text for text in texts if text is not None]
        if found:
            reasons[choice] = "; ".join(dict.fromkeys(found))
    return reasons


def decide_for_all(
    answer: Answer,
    policy: Policy,
    batches: Sequence[Batch],
    setting: Setting,
    default: Callable[[Batch, Setting], str],
) -> Choice:
    """The one choice for all of `batches` with the least mean regret, as a captured graph needs.

    It must be allowed on each batch on which anything is. Estimates are geometric means.
    """
    surveys = [policy.survey(batch) for batch in batches]
    every = [decide(answer, policy, batch, setting, default(batch, setting)) for batch in batches]
    open_ones = [one for one in every if one.arms] or every
    allowed = [choice for choice in answer.choices if all(choice in one.arms for one in open_ones)]
    known = [choice for choice in allowed if all(choice in one.estimates for one in open_ones)]
    costs = {choice: 1 + _mean_regret(choice, known, open_ones) for choice in known}

    choice, verdict = _settle(answer, surveys, allowed, costs, open_ones[0].default)
    if verdict is Verdict.UNSURE and choice is not None:
        ahead = (_mean_least_ratio(choice, other, open_ones) for other in known if other != choice)
        if min(ahead) > 1 + MARGIN:
            verdict = Verdict.WIN
    estimates = {name: _mean_estimate([one.estimates[name] for one in open_ones]) for name in known}
    return Choice(
        answer=answer.name,
        choice=choice,
        verdict=verdict,
        estimates=estimates,
        arms={name: open_ones[0].arms[name] for name in allowed},
        # Of several reasons against a choice the one at the shortest context.
        forbidden={name: why for one in reversed(open_ones) for name, why in one.forbidden.items()},
        default=open_ones[0].default,
        tied=_tied(costs) if verdict is Verdict.TIE else (),
    )


def _mean_regret(choice: str, known: Sequence[str], decisions: Sequence[Choice]) -> float:
    total = 0.0
    for one in decisions:
        best = min(one.estimates[name].latency_us for name in known)
        total += one.estimates[choice].latency_us / best - 1
    return total / len(decisions)


def _mean_least_ratio(best: str, other: str, decisions: Sequence[Choice]) -> float:
    ratios = [_least_ratio(one.estimates[best], one.estimates[other]) for one in decisions]
    return sum(ratios) / len(ratios)


def _mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    def mean(values: Sequence[float]) -> float:
        return exp(sum(map(log, values)) / len(values))

    return Estimate(
        mean([one.latency_us for one in estimates]),
        mean([one.low_us for one in estimates]),
        mean([one.high_us for one in estimates]),
        any(one.extrapolated for one in estimates),
    )
