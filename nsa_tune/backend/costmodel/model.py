"""What a decision needs of an arm: its latency models, and where it failed.

An arm's time is a weighted sum of the point's features; no weight is negative. That is exact enough
to choose by, and cheap enough for every forward pass. How long a batch takes is for the surfaces
(`surface.py`), which know what such a sum misses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter, mul, truediv
from typing import NamedTuple

from nsa_tune.backend.costmodel.least_squares import fitted_weights
from nsa_tune.backend.types.batch import Batch

FEWEST = 3
"""Batches that must have been measured; with fewer an arm's time counts as unknown."""
MOST_BOXES = 64
"""Ranges of batches that an arm is kept out of, in regimes that are alike; each is looked at in
every plan. An arm that failed in more places is not taken at all."""

_sums = attrgetter("batch_size", "q_tokens", "kv_tokens", "max_kv")
_CLOSE = 0.25
"""Log distance to the nearest other arm at which a batch counts half in a fit: a model's errors
matter where two arms come close, and nowhere else (docs/policy.md)."""
_BELOW = 0.7
"""A failure speaks for batches of at least this part of its own in every sum: half an octave."""


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """One arm's time in one regime, linear in the point's features."""

    weights: tuple[float, ...]
    """Microseconds for one of each feature; the last, positive, is for a batch without work."""
    _terms: tuple[tuple[int, float], ...] = field(init=False, repr=False, compare=False)
    """Number and weight of the features that count."""

    def __post_init__(self) -> None:
        terms = [(i, weight) for i, weight in enumerate(self.weights[:-1]) if weight]
        object.__setattr__(self, "_terms", tuple(terms))

    @property
    def used(self) -> Iterator[int]:
        """Numbers of the features that count."""
        return (i for i, _ in self._terms)

    def latency_us(self, features: Sequence[float]) -> float:
        """The time of a batch with these features, which are never negative."""
        total = self.weights[-1]
        for i, weight in self._terms:
            total += weight * features[i]
        return total


def fit(
    features: Sequence[tuple[float, ...]],
    times_us: Sequence[float],
    gaps: Sequence[float] = (),
    columns: Sequence[int] | None = None,
) -> LatencyModel | None:
    """The model of batches with these features and times, or None of too few different ones.

    `gaps` has for each batch the log distance to the nearest other arm's time; near ones count
    more. Without it all count alike. Of the features only those numbered in `columns` get weights.
    """
    if len(set(features)) < FEWEST:
        return None
    counts = [_CLOSE / (_CLOSE + gap) for gap in gaps] or [1.0] * len(times_us)
    # Errors count relatively, so all is divided by the time.
    scales = list(map(truediv, counts, times_us))
    amounts = list(zip(*features, strict=True))
    used = range(len(amounts)) if columns is None else columns
    scaled = [list(map(mul, amounts[i], scales)) for i in used]
    *fitted, constant = fitted_weights([*scaled, scales], counts)
    weights = dict(zip(used, fitted, strict=True))
    # A model of nothing but features that are 0 on some batch would be free there.
    least = max(constant, 0.01 * min(times_us))
    if not all(weight < inf for weight in (*fitted, least)):
        raise ArithmeticError("the times of an arm are too far apart to fit a model to them")
    return LatencyModel((*(weights.get(i, 0.0) for i in range(len(amounts))), least))


class Box(NamedTuple):
    """A range of batches, by sequences, q tokens, kv tokens and longest sequence."""

    low: tuple[int, int, int, int]
    high: tuple[int | None, int | None, int | None, int | None]
    """Both ends are inside; None is without an end."""
    reason: str

    def holds(self, batch: Batch) -> bool:
        """Whether `batch` lies inside."""
        return all(
            low <= size and (high is None or size <= high)
            for size, low, high in zip(_sums(batch), self.low, self.high, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Failures:
    """Where an arm failed when it was measured."""

    wrong: str | None
    """How its output was wrong once: then it is not taken anywhere."""
    boxes: Mapping[int, tuple[Box, ...]]
    """By `Point.regime_group`."""

    def reason(self, group: int, batch: Batch) -> str | None:
        """Why the arm must not run there."""
        if self.wrong is not None:
            return self.wrong
        for box in self.boxes.get(group, ()):
            if box.holds(batch):
                return box.reason
        return None


def boxes(failed: Iterable[tuple[Batch, str]], passed: Iterable[Batch]) -> tuple[Box, ...]:
    """What `failed`, (batch, reason) pairs of one arm on one regime, forbids.

    A batch that is bigger than a failed one in every sum fails too, so far as is known, and one
    that is only a little smaller may. Where the arm passed is left out.
    """
    good = sorted({_sums(batch) for batch in passed})
    ranges: list[Box] = []
    for batch, reason in sorted(failed, key=lambda pair: (_sums(pair[0]), pair[1])):
        if any(box.holds(batch) for box in ranges):
            continue
        if len(ranges) == MOST_BOXES:
            return (Box((0, 0, 0, 0), (None, None, None, None), f"and in many others: {reason}"),)
        ranges.append(_box(_sums(batch), reason, good))
    return tuple(ranges)


def _box(
    failed: tuple[int, int, int, int], reason: str, good: Sequence[tuple[int, int, int, int]]
) -> Box:
    low = [round(_BELOW * size) if good else 0 for size in failed]
    high: list[int | None] = [None] * len(low)
    for sums in good:
        inside = all(
            size >= bottom and (top is None or size <= top)
            for size, bottom, top in zip(sums, low, high, strict=True)
        )
        if not inside or sums == failed:
            continue  # of a success and a failure with the same sums the failure counts
        ratios = [size / limit for size, limit in zip(sums, failed, strict=True)]
        smallest = min(range(len(ratios)), key=ratios.__getitem__)
        if ratios[smallest] < 1:
            low[smallest] = sums[smallest] + 1
        else:
            largest = max(range(len(ratios)), key=ratios.__getitem__)
            high[largest] = sums[largest] - 1
    return Box((low[0], low[1], low[2], low[3]), (high[0], high[1], high[2], high[3]), reason)
