"""What a table's choices lose on batches that it has not measured, by leaving measured ones out.

The batches of a point are dealt into parts. Each part is left out in turn, the models are fitted to
the others, and what they choose on the part's batches is judged by the times measured there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from random import Random
from statistics import fmean, pvariance

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.regret import regret
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Measurement, Status

_PARTS = 8
_UNTIMED = 0.5
"""Regret of an arm that was not timed because it was clearly slower."""
_UNKNOWN = 0.5
"""A mean regret that may be this large is as good as unknown."""
_FEWEST = 12
"""Batches below which nothing is said: those few that lose much may all be missing
(docs/method.md)."""
_UNSEEN = 0.02
"""What a batch may lose where none was seen to lose anything; by the rule of three, of n batches
without a loss at most 3 / n may lose, with 95 % confidence."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The regret of one question on batches that were left out of the fit."""

    mean: float
    most: float
    """Upper end of the mean's 95 % interval."""
    batches: int

    def __str__(self) -> str:
        """In words: ``0.05% (at most 0.4%)``."""
        if self.batches < _FEWEST or self.most >= _UNKNOWN:
            return f"unknown after {self.batches} batches"
        return f"{self.mean:.2%} (at most {self.most:.1%})"


def left_out(
    points: Iterable[Point], setting: Setting, rows: Iterable[Measurement]
) -> dict[str, LeftOut]:
    """By question, for which at least two batches have a choice."""
    by_point: dict[str, list[Measurement]] = {}
    for row in rows:
        by_point.setdefault(row.point, []).append(row)
    estimates: dict[str, LeftOut] = {}
    for point in points:
        if point.name in by_point:
            estimates |= _of_point(point, setting, by_point[point.name])
    return estimates


def _of_point(point: Point, setting: Setting, rows: Sequence[Measurement]) -> dict[str, LeftOut]:
    times: dict[str, dict[str, float]] = {}
    for row in (measured.amortised(setting.sharing) for measured in rows):
        if row.status is Status.OK and row.latency_us is not None:
            times.setdefault(row.batch, {})[row.arm] = row.latency_us
    words = sorted(word for word, by_arm in times.items() if len(by_arm) > 1)
    Random(0).shuffle(words)
    losses: dict[str, list[float]] = {}
    for part in range(min(_PARTS, len(words))):
        away = set(words[part::_PARTS])
        policy = Policy.fit(point, setting, (row for row in rows if row.batch not in away))
        for word in away:
            chosen = _chosen(policy, Batch.parse(word))
            for name, arm in chosen.items():
                cost = _cost(point, name, times[word], arm)
                if cost is not None:
                    losses.setdefault(name, []).append(cost)
    names = (question.name for question in point.questions)
    return {name: _summed(losses[name]) for name in names if len(losses.get(name, ())) > 1}


def _chosen(policy: Policy, batch: Batch) -> dict[str, str]:
    """By question, the allowed arm that the models take for the fastest."""
    times = {arm: us for arm, us in policy.survey(batch).latencies.items() if us is not None}
    chosen: dict[str, str] = {}
    for question in policy.point.questions:
        timed = [arm for arms in question.choices.values() for arm in arms if arm in times]
        if timed:
            chosen[question.name] = min(timed, key=times.__getitem__)
    return chosen


def _cost(point: Point, name: str, times: Mapping[str, float], arm: str) -> float | None:
    """The regret of the choice that `arm` stands for; None where there is no choice."""
    choices = next(question.choices for question in point.questions if question.name == name)
    by_choice = {
        choice: min(times[name] for name in arms if name in times)
        for choice, arms in choices.items()
        if any(name in times for name in arms)
    }
    if len(by_choice) < 2:
        return None
    choice = next(choice for choice, arms in choices.items() if arm in arms)
    return regret(by_choice, choice) if choice in by_choice else _UNTIMED


def _summed(losses: Sequence[float]) -> LeftOut:
    mean, count = fmean(losses), len(losses)
    most = mean + 2 * sqrt(pvariance(losses, mean) / count) + 3 / count * _UNSEEN
    return LeftOut(mean, most, count)
