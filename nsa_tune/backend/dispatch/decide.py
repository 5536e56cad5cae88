"""Verdicts: which choice answers a question, how sure that is, and why the others do not.

Hard limits come first, the arms' times next, the winner last. `pick` chooses by the latency models,
for plans and for everything else; `decide` gives the same choice with all that a reader wants to
know, and says by the estimates how sure it is. `decide_for_all` chooses once for many batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import exp, hypot, inf, log
from typing import TypeAlias

from nsa_tune.backend.costmodel.policy import Policy, Survey
from nsa_tune.backend.costmodel.regret import MARGIN, mean_regret
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Question

Choices: TypeAlias = Iterable[tuple[str, Sequence[str]]]
"""Choices with the arms that answer them."""


class Verdict(StrEnum):
    """How a choice came about."""

    WIN = "win"
    """Faster than every other by more than the margin, at the far ends of the intervals too."""
    TIE = "tie"
    """Estimated within the margin of another."""
    UNSURE = "unsure"
    """Chosen as fastest, but the estimates leave room for another, or even speak for it."""
    ONLY = "only"
    """Every other choice is forbidden."""
    BASELINE = "baseline"
    """Too little is measured to compare: the engine's own baseline, or what is allowed instead."""
    FORCED = "forced"
    """Follows from the batch and the other choices, or NSA_TUNE_FORCE asks for it."""
    NONE = "none"
    """Every choice is forbidden: there is no question, and the engine keeps its own."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen for one question on one batch, and why."""

    question: str
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
    """What the engine's baseline takes."""
    tied: tuple[str, ...] = ()
    """The choices of a tie, the taken one among them."""


def decide(
    question: Question,
    policy: Policy,
    batch: Batch,
    default: str,
    forced: str | None = None,
) -> Choice:
    """The choice for one question on `batch`, with all that led to it.

    `default` is the choice of the engine's baseline, `forced` an arm to take if it is allowed.
    """
    survey = policy.survey(batch)
    choice, verdict = pick(question, survey, default, forced)
    every = policy.estimates(batch)
    arms, _ = _best_arms(question.choices.items(), survey.latencies)
    estimates = {name: every[arm] for name, arm in arms.items() if arm in every}
    tied: tuple[str, ...] = ()
    if verdict in _COMPARED and choice is not None:
        verdict, tied = _confirmed(choice, [estimates], [1.0])
    forbidden = _forbidden(question, policy, survey, batch)
    return Choice(question.name, choice, verdict, estimates, arms, forbidden, default, tied)


def pick(
    question: Question,
    survey: Survey,
    default: str,
    forced: str | None = None,
    choices: Choices | None = None,
) -> tuple[str | None, Verdict]:
    """The choice, and its verdict as far as the costs say: a winner is UNSURE here.

    `choices` are those of the question that this device has arms for; without, all are looked at.
    """
    allowed, costs = _best_arms(choices or question.choices.items(), survey.latencies)
    if forced in survey.latencies:
        for choice in allowed:
            if forced in question.choices[choice]:
                return choice, Verdict.FORCED
    return resolve(question, (survey,), [*allowed], costs, default, survey.margin)


def resolve(
    question: Question,
    surveys: Sequence[Survey],
    allowed: Sequence[str],
    costs: Mapping[str, float],
    default: str,
    margin: float = MARGIN,
) -> tuple[str | None, Verdict]:
    """The choice among `allowed` (in declared order), by `costs` where two of them have one."""
    if len(allowed) == 1 and (costs or default in question.choices):
        return allowed[0], Verdict.ONLY
    if len(costs) >= 2:
        tied = _tied(costs, margin)
        if len(tied) == 1:
            return tied[0], Verdict.UNSURE
        return (default if default in tied else tied[0]), Verdict.TIE
    if default in allowed:
        return default, Verdict.BASELINE
    # A baseline may name what this point has no arm for on this device (a kernel that nobody
    # declared). No guard speaks against that, so it stands, unless every known way is forbidden.
    possible = _candidates(question, surveys)
    if default not in possible and (allowed or not possible):
        return default, Verdict.BASELINE
    if allowed:
        return next(iter(costs), allowed[0]), Verdict.BASELINE
    return None, Verdict.NONE


_COMPARED = frozenset({Verdict.TIE, Verdict.UNSURE})


def _best_arms(
    choices: Choices, latencies: Mapping[str, float | None]
) -> tuple[dict[str, str], dict[str, float]]:
    """The fastest allowed arm of each allowed choice, the first declared of equal ones and where
    none has a time; and what those choices cost whose arms have been measured."""
    fastest: dict[str, str] = {}
    costs: dict[str, float] = {}
    for choice, arms in choices:
        least_us = inf
        for arm in arms:
            if arm in latencies:
                latency_us = latencies[arm]
                if latency_us is not None and latency_us < least_us:
                    fastest[choice], costs[choice] = arm, latency_us
                    least_us = latency_us
                elif choice not in fastest:
                    fastest[choice] = arm
    return fastest, costs


def _confirmed(
    choice: str, estimates: Sequence[Mapping[str, Estimate]], weights: Sequence[float]
) -> tuple[Verdict, tuple[str, ...]]:
    """What the estimates of one or more batches say of a choice by costs, and who ties with it."""
    names = [name for name in estimates[0] if all(name in batch for batch in estimates)]
    if choice not in names or len(names) < 2:
        return Verdict.UNSURE, ()
    times = [{name: batch[name].latency_us for name in names} for batch in estimates]
    losses = {name: 1 + mean_regret(times, weights, name) for name in names}
    tied = _tied(losses)
    if choice not in tied:
        return Verdict.UNSURE, ()
    if len(tied) > 1:
        return Verdict.TIE, tied
    ahead = min(
        sum(
            weight * _least_ratio(batch[choice], batch[other])
            for batch, weight in zip(estimates, weights, strict=True)
        )
        for other in names
        if other != choice
    )
    return (Verdict.WIN if ahead > 1 + MARGIN else Verdict.UNSURE), ()


def _candidates(question: Question, surveys: Sequence[Survey]) -> list[str]:
    """The choices that a survey knows an arm of, allowed or not."""
    arms = {arm for survey in surveys for arm in (*survey.latencies, *survey.forbidden)}
    return [choice for choice, names in question.choices.items() if not arms.isdisjoint(names)]


def _tied(costs: Mapping[str, float], margin: float = MARGIN) -> tuple[str, ...]:
    limit = min(costs.values()) * (1 + margin)
    return tuple([choice for choice, cost in costs.items() if cost <= limit])


def _least_ratio(best: Estimate, other: Estimate) -> float:
    """The low end of the interval of other / best; the two errors are independent."""
    down = log(other.latency_us / other.low_us)
    up = log(best.high_us / best.latency_us)
    return other.latency_us / best.latency_us * exp(-hypot(down, up))


def _forbidden(question: Question, policy: Policy, survey: Survey, batch: Batch) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for choice, names in question.choices.items():
        if any(name in survey.latencies for name in names):
            continue
        whys = [survey.forbidden[name] for name in names if name in survey.forbidden]
        if not whys:
            # None of its arms fits this device and layout, or all are references that a kernel
            # stands for; only the former is worth a word.
            texts = (policy.point.arm(name).allowed(batch, policy.setting) for name in names)
            whys = [text for text in texts if text is not None]
        if whys:
            reasons[choice] = "; ".join(dict.fromkeys(whys))
    return reasons


def decide_for_all(
    question: Question,
    policy: Policy,
    batches: Sequence[Batch],
    default: Callable[[Batch], str],
    *,
    weights: Sequence[float] = (),
    forced: str | None = None,
) -> Choice:
    """The one choice for all of `batches` with the least mean regret, as a captured graph needs.

    It must be allowed on each batch on which anything is. Batches on which fewer than two choices
    were measured do not count, unless all are such. `default` is the engine's baseline. `weights`
    say how often each batch comes, equally without. Estimates are geometric means.
    """
    surveys = [policy.survey(batch) for batch in batches]
    every = [decide(question, policy, batch, default(batch)) for batch in batches]
    allowing = [i for i, decision in enumerate(every) if decision.arms] or list(range(len(every)))
    allowed = [name for name in question.choices if all(name in every[i].arms for i in allowing)]
    told = list(map(partial(_weighed, question), every, surveys))
    counted = [i for i in allowing if sum(name in told[i] for name in allowed) > 1] or allowing
    decisions = [every[i] for i in counted]
    shares = _shares([weights[i] if weights else 1.0 for i in counted])
    losses = _losses(allowed, [told[i] for i in counted], shares)
    # What the baseline takes most often is the default for all.
    defaults = [decision.default for decision in decisions]
    usual = max(dict.fromkeys(defaults), key=defaults.count)

    choice, verdict = resolve(question, surveys, allowed, losses, usual)
    wanted = [name for name in allowed if forced in question.choices[name]]
    if wanted and all(forced in surveys[i].latencies for i in allowing):
        choice, verdict = wanted[0], Verdict.FORCED
    tied: tuple[str, ...] = ()
    if verdict in _COMPARED and choice is not None:
        verdict, tied = _confirmed(choice, [decision.estimates for decision in decisions], shares)
    return Choice(
        question=question.name,
        choice=choice,
        verdict=verdict,
        estimates=_mean_estimates(allowed, decisions, shares),
        arms={name: decisions[0].arms[name] for name in allowed},
        forbidden=_forbidden_somewhere([every[i] for i in allowing], allowed),
        default=usual,
        tied=tied,
    )


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def _losses(
    allowed: Sequence[str], costs: Sequence[Mapping[str, float]], shares: Sequence[float]
) -> dict[str, float]:
    """One plus the mean regret of each choice that has a cost on every batch."""
    compared = [name for name in allowed if all(name in batch for batch in costs)]
    times = [{name: batch[name] for name in compared} for batch in costs]
    return {name: 1 + mean_regret(times, shares, name) for name in compared}


def _mean_estimates(
    allowed: Sequence[str], decisions: Sequence[Choice], shares: Sequence[float]
) -> dict[str, Estimate]:
    """Those of the choices that have an estimate on every batch."""
    return {
        name: _mean_estimate([decision.estimates[name] for decision in decisions], shares)
        for name in allowed
        if all(name in decision.estimates for decision in decisions)
    }


def _forbidden_somewhere(decisions: Sequence[Choice], allowed: Sequence[str]) -> dict[str, str]:
    """Why the other choices are not allowed everywhere: of several reasons against a choice, the
    one at the shortest context."""
    return {
        name: why
        for decision in reversed(decisions)
        for name, why in decision.forbidden.items()
        if name not in allowed
    }


def _weighed(question: Question, decision: Choice, survey: Survey) -> dict[str, float]:
    """What each choice costs on one batch of several. How much one is ahead counts there, so that
    the estimates tell, and the costs, which say who is ahead, only where one has no estimate."""
    _, costs = _best_arms(question.choices.items(), survey.latencies)
    if all(name in decision.estimates for name in costs):
        return {name: decision.estimates[name].latency_us for name in costs}
    return costs


def _mean_estimate(estimates: Sequence[Estimate], shares: Sequence[float]) -> Estimate:
    def mean(values: Sequence[float]) -> float:
        return exp(sum(share * log(x) for x, share in zip(values, shares, strict=True)))

    return Estimate(
        mean([estimate.latency_us for estimate in estimates]),
        mean([estimate.low_us for estimate in estimates]),
        mean([estimate.high_us for estimate in estimates]),
        any(estimate.extrapolated for estimate in estimates),
    )
