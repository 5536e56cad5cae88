"""What a table's choices lose on batches that it has not measured, by leaving measured ones out.

The batches of a point are dealt into parts. Each part is left out in turn, the models are fitted to
the others, and what they choose on the part's batches is judged by the times measured there. An
adaptive run measures most where arms are close, so every batch counts by how many random batches of
the point lie nearest to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import dist, sqrt
from random import Random

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.regret import regret
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Measurement, Status

_PARTS = 8
_DRAWN = 160
"""Random batches that weigh the measured ones."""
_NEAREST = 3
"""Measured batches among which a random one is divided."""
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
    losses: dict[str, dict[str, float]] = {}
    for part in range(min(_PARTS, len(words))):
        away = set(words[part::_PARTS])
        policy = Policy.fit(point, setting, (row for row in rows if row.batch not in away))
        for word in away:
            chosen = _chosen(policy, Batch.parse(word))
            for name, arm in chosen.items():
                cost = _cost(point, name, times[word], arm)
                if cost is not None:
                    losses.setdefault(name, {})[word] = cost
    nearest = _Nearest(point, setting, words)
    return {
        name: _summed(losses[name], nearest.weights(losses[name]))
        for name in (question.name for question in point.questions)
        if len(losses.get(name, ())) > 1
    }


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


class _Nearest:
    """Random batches of a point, and which measured ones lie nearest to them."""

    def __init__(self, point: Point, setting: Setting, words: Iterable[str]) -> None:
        features, random = point.features(setting), Random(f"{point.name} 0")
        self._at = {word: features.position(Batch.parse(word)) for word in words}
        self._drawn = []
        for _ in range(_DRAWN):
            self._drawn.append(features.position(point.sample(setting, random)))

    def weights(self, among: Iterable[str]) -> dict[str, float]:
        """How much each of `among` counts; those that nothing drawn is near to count 0."""
        weights = dict.fromkeys(among, 0.0)
        for drawn in self._drawn:
            near = sorted(
                (dist(drawn.coordinates, self._at[word].coordinates), word)
                for word in weights
                if self._at[word].regime == drawn.regime
            )[:_NEAREST]
            for _, word in near:
                weights[word] += 1 / len(near)
        return weights if any(weights.values()) else dict.fromkeys(weights, 1.0)


def _summed(losses: Mapping[str, float], weights: Mapping[str, float]) -> LeftOut:
    total = sum(weights.values())
    shares = {word: weight / total for word, weight in weights.items()}
    mean = sum(losses[word] * share for word, share in shares.items())
    spread = sum(share * (losses[word] - mean) ** 2 for word, share in shares.items())
    counted = 1 / sum(share**2 for share in shares.values())
    most = mean + 2 * sqrt(spread / counted) + 3 / counted * _UNSEEN
    return LeftOut(mean, most, len(losses))
