"""Judging cost models by what they choose among the measured batches of a sheet.

Each arm's model is fitted by itself, to a wide range of times. Where one arm is the fastest all
over it, by a few percent here and by more there, the errors of two fits may say otherwise where it
is close: then one model with a factor for each arm, which always chooses the same, loses less and
takes their place. It tells who is ahead, and how far only on the mean: that is for the surfaces,
which decide where even this is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from operator import itemgetter, mul
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from nsa_tune.backend.costmodel.model import CostModel

if TYPE_CHECKING:
    from nsa_tune.backend.types.point import Answer

__all__ = ["Models", "Successes", "judged"]

_MOST_REGRET = 0.01
"""Mean regret on measured batches above which the surfaces decide."""
_LEAST_GAIN = 0.0002
"""Mean regret, summed over the questions, that one model with factors must spare."""
_JUDGED = 100
"""Batches of a sheet on which the models are judged, at most."""
_COST = itemgetter(1)

Models: TypeAlias = dict[str, dict[int, CostModel]]
"""By arm and sheet."""
_Question: TypeAlias = list[tuple[str, ...]]
"""The arms of each choice."""
_Times: TypeAlias = Mapping[str, tuple[float, float]]
"""By arm: as measured, and by its model."""


class Successes(NamedTuple):
    """What an arm took on the batches of a sheet, in columns."""

    batches: list[str]
    terms: list[tuple[float, ...]]
    times_us: list[float]


def judged(
    answers: Iterable[Answer],
    models: Models,
    successes: Mapping[str, Mapping[int, Successes]],
) -> tuple[Models, frozenset[int]]:
    """The models to decide by, and the sheets on which they choose badly nevertheless."""
    measured = {arm for arm, sheets in models.items() if sheets}
    questions: list[_Question] = [
        [arms for arms in answer.choices.values() if not measured.isdisjoint(arms)]
        for answer in answers
    ]
    models = {arm: dict(sheets) for arm, sheets in models.items()}
    bad = set()
    for sheet in {sheet for some in successes.values() for sheet in some}:
        times = list(_timed(sheet, models, successes).values())
        losses = _mean_losses(questions, times)
        shares = _shares(times)
        own = {arm for arm, sheets in models.items() if sheet in sheets}
        if sum(losses) > _LEAST_GAIN and shares.keys() == own:
            alike = _mean_losses(questions, [_in_step(one, shares) for one in times])
            if sum(alike) < sum(losses) - _LEAST_GAIN:
                losses = alike
                _put_in_step(sheet, models, shares)
        if any(loss > _MOST_REGRET for loss in losses):
            bad.add(sheet)
    return models, frozenset(bad)


def _timed(
    sheet: int, models: Models, successes: Mapping[str, Mapping[int, Successes]]
) -> dict[str, _Times]:
    """The times on enough batches of a sheet, spread over all."""
    own = {arm: some[sheet] for arm, some in successes.items() if sheet in some}
    texts = sorted({batch for some in own.values() for batch in some.batches})
    times: dict[str, dict[str, tuple[float, float]]] = {
        text: {} for text in texts[:: len(texts) // _JUDGED + 1]
    }
    for arm, (batches, every, times_us) in own.items():
        model = models[arm].get(sheet)
        if model is not None:
            weights, constant = model.weights, model.weights[-1]
            for batch, terms, time_us in zip(batches, every, times_us, strict=True):
                if batch in times:
                    times[batch][arm] = (time_us, sum(map(mul, weights, terms), constant))
    return {**times}


def _mean_losses(questions: Sequence[_Question], times: Sequence[_Times]) -> list[float]:
    """The mean regret of each question that arises, by choosing the least cost."""
    found = []
    for choices in questions:
        losses = [loss for one in times if (loss := _loss(choices, one)) is not None]
        if losses:
            found.append(fmean(losses))
    return found


def _loss(choices: Sequence[Sequence[str]], times: _Times) -> float | None:
    """What is lost by taking the choice of the least cost; None without another."""
    known: list[tuple[float, float]] = []
    for arms in choices:
        some = [times[arm] for arm in arms if arm in times]
        if len(some) > 1:
            known.append((min([time for time, _ in some]), min([cost for _, cost in some])))
        else:
            known += some
    if len(known) < 2:
        return None
    return min(known, key=_COST)[0] / min(known)[0] - 1


def _shares(times: Sequence[_Times]) -> dict[str, float]:
    """Each arm's mean time as a share of the fastest's, on batches where it has another beside."""
    logs: dict[str, list[float]] = {}
    for one in times:
        if len(one) < 2:
            continue
        fastest = min(time for time, _ in one.values())
        for arm, (time, _) in one.items():
            logs.setdefault(arm, []).append(log(time / fastest))
    return {arm: exp(fmean(some)) for arm, some in logs.items()}


def _in_step(times: _Times, shares: Mapping[str, float]) -> _Times:
    """`times` with the shares as costs."""
    return {arm: (time, shares[arm]) for arm, (time, _) in times.items()}


def _put_in_step(sheet: int, models: Models, shares: Mapping[str, float]) -> None:
    """Give every arm the model of the one with the least share, times its own."""
    first = min(shares, key=lambda arm: (shares[arm], arm))
    model = models[first][sheet]
    for arm, share in shares.items():
        factor = share / shares[first]
        models[arm][sheet] = replace(
            model, weights=tuple(factor * weight for weight in model.weights)
        )
