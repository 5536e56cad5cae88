"""Model selection: which latency models decide in a regime.

Each arm's model is fitted by itself, over a wide range of times. Where one arm is the fastest
everywhere, here by a few percent and there by more, the errors of two fits may say otherwise where
the arms come close. Then one model with a factor for each arm loses less: it always chooses the
same arm. It replaces the arms' own models; it tells who is ahead, but how far only on average.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from operator import mul
from statistics import fmean
from typing import NamedTuple, TypeAlias

from nsa_tune.backend.costmodel.model import LatencyModel
from nsa_tune.backend.costmodel.regret import regret
from nsa_tune.backend.types.point import Question

_LEAST_GAIN = 0.0002
"""Mean regret, summed over the questions, that one model with factors must spare."""
_JUDGED = 100
"""Batches of a regime on which the models are judged, at most."""

Models: TypeAlias = dict[str, dict[int, LatencyModel]]
"""By arm and regime."""
_Choices: TypeAlias = list[tuple[str, ...]]
"""The arms of each choice."""
_Times: TypeAlias = Mapping[str, tuple[float, float]]
"""By arm: as measured, and by its model."""


class Successes(NamedTuple):
    """What an arm took on the batches of a regime, in columns."""

    batches: list[str]
    features: list[tuple[float, ...]]
    times_us: list[float]


def selected(
    questions: Iterable[Question],
    models: Models,
    successes: Mapping[str, Mapping[int, Successes]],
) -> Models:
    """The models to decide by."""
    measured = {arm for arm, regimes in models.items() if regimes}
    choices: list[_Choices] = [
        [arms for arms in question.choices.values() if not measured.isdisjoint(arms)]
        for question in questions
    ]
    models = {arm: dict(regimes) for arm, regimes in models.items()}
    for regime in {regime for some in successes.values() for regime in some}:
        times = list(_timed(regime, models, successes).values())
        losses = _mean_losses(choices, times)
        shares = _shares(times)
        modelled = {arm for arm, regimes in models.items() if regime in regimes}
        if sum(losses) > _LEAST_GAIN and shares.keys() == modelled:
            alike = _mean_losses(choices, [_in_step(batch, shares) for batch in times])
            if sum(alike) < sum(losses) - _LEAST_GAIN:
                _put_in_step(regime, models, shares)
    return models


def _timed(
    regime: int, models: Models, successes: Mapping[str, Mapping[int, Successes]]
) -> dict[str, _Times]:
    """The times on enough batches of a regime, spread over all."""
    measured = {arm: some[regime] for arm, some in successes.items() if regime in some}
    texts = sorted({batch for some in measured.values() for batch in some.batches})
    times: dict[str, dict[str, tuple[float, float]]] = {
        text: {} for text in texts[:: len(texts) // _JUDGED + 1]
    }
    for arm, (batches, every, times_us) in measured.items():
        model = models[arm].get(regime)
        if model is not None:
            weights, constant = model.weights, model.weights[-1]
            for batch, features, time_us in zip(batches, every, times_us, strict=True):
                if batch in times:
                    times[batch][arm] = (time_us, sum(map(mul, weights, features), constant))
    return {**times}


def _mean_losses(questions: Sequence[_Choices], times: Sequence[_Times]) -> list[float]:
    """The mean regret of each question that arises, by choosing the least cost."""
    means = []
    for choices in questions:
        losses = [loss for batch in times if (loss := _loss(choices, batch)) is not None]
        if losses:
            means.append(fmean(losses))
    return means


def _loss(choices: Sequence[Sequence[str]], times: _Times) -> float | None:
    """What is lost by taking the choice of the least cost; None without another."""
    measured: dict[int, float] = {}
    costs: dict[int, float] = {}
    for choice, arms in enumerate(choices):
        some = [times[arm] for arm in arms if arm in times]
        if some:
            measured[choice] = min([time for time, _ in some])
            costs[choice] = min([cost for _, cost in some])
    return regret(measured, min(costs, key=costs.__getitem__)) if len(costs) > 1 else None


def _shares(times: Sequence[_Times]) -> dict[str, float]:
    """Each arm's mean time as a share of the fastest's, on batches where it has another beside."""
    logs: dict[str, list[float]] = {}
    for batch in times:
        if len(batch) < 2:
            continue
        fastest = min(time for time, _ in batch.values())
        for arm, (time, _) in batch.items():
            logs.setdefault(arm, []).append(log(time / fastest))
    return {arm: exp(fmean(some)) for arm, some in logs.items()}


def _in_step(times: _Times, shares: Mapping[str, float]) -> _Times:
    """`times` with the shares as costs."""
    return {arm: (time, shares[arm]) for arm, (time, _) in times.items()}


def _put_in_step(regime: int, models: Models, shares: Mapping[str, float]) -> None:
    """Give every arm the model of the one with the least share, times its own."""
    first = min(shares, key=lambda arm: (shares[arm], arm))
    model = models[first][regime]
    for arm, share in shares.items():
        factor = share / shares[first]
        models[arm][regime] = replace(
            model, weights=tuple(factor * weight for weight in model.weights)
        )
