"""The adaptive schedule: coarse batches first, then more where arms are close to each other.

Each point is searched by itself, and points take turns. The candidates are the point's grid and the
batches of a trace. A sample of batches tells how good the measurements are: random batches of the
point, drawn with a seed, and the trace's, weighted by how often they occur.

1. Coarse: in every regime the candidates that lie farthest from each other are measured.
2. Refinement: a policy is fitted, and the expected regret of each batch of the sample is estimated.
   It grows as arms get closer. The candidates nearest to the most expected regret are measured
   next.
3. End: the search of a point ends when the expected regret on the worst tenth of the sample is
   below the target for every question, or no longer falls.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil, dist, floor, inf, sqrt
from random import Random

from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.search.contenders import contenders, expected_loss_bound
from nsa_tune.autotune.search.farthest_point import farthest_point_order
from nsa_tune.autotune.search.traced import most_frequent
from nsa_tune.autotune.workload.weighted_batches import WeightedBatch
from nsa_tune.backend.costmodel.model import FEWEST
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.regret import tail_mean
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Arm, FeatureFunctions, Point, Setting
from nsa_tune.backend.types.records import Measurement

TAIL = 0.1
"""The target applies to the mean regret of this share of batches, the worst ones. On most batches
one arm is clearly faster, and a mean over all batches would hide those where it matters."""
_COARSE = 1.5
"""Coarse batches of a regime: this times the square root of its candidates."""
_SAMPLED = 160
"""Random batches of the sample."""
_TRACE_SHARE = 0.5
"""Share of the sample's weight that the trace's batches have."""
_SHARE, _SHARE_AT = 0.2, 0.01
"""A search takes at most this share of its candidates' measurements when the target regret is 0.01
or more. A lower target allows proportionally more."""
_FEW = 200
"""So many measurements are always allowed: on a GPU they take three seconds."""
_REFIT = 6
"""Batches between two fits."""
_PATIENCE = 18
"""A point's search ends after so many batches in which its expected regret did not fall by
`_FALL`."""
_FALL = 0.1
_HOT = 60
"""Refinement looks at so many batches of the sample, those with the highest regret."""


class Adaptive:
    """A `Schedule` that ends when the expected regret is below a target.

    Args:
        stored: rows that are stored already.
        target_regret: mean regret on the worst tenth of batches.
        trace: batches to measure too, and to draw half of the sample from.
    """

    def __init__(
        self,
        points: Sequence[Point],
        setting: Setting,
        stored: Sequence[Measurement],
        *,
        target_regret: float = 0.01,
        trace: Sequence[WeightedBatch] = (),
        seed: int = 0,
    ) -> None:
        self._searches = [
            _PointSearch(point, setting, stored, target_regret, trace, seed) for point in points
        ]
        self._of = {search.point.name: search for search in self._searches}
        share = min(_SHARE * max(_SHARE_AT / max(target_regret, 1e-9), 1.0), 1.0)
        most = max(floor(share * sum(search.size for search in self._searches)), _FEW)
        most -= sum(search.stored for search in self._searches)
        # The coarse batches are always measured, even if they exceed a small grid's share.
        self._left = max(most, sum(search.queued for search in self._searches))

    def next(self) -> Job | None:
        """The next job of the next point that has one."""
        # Points with coarse batches left come first: refining one point must not use up the
        # measurements that another one's coarse batches need.
        for search in sorted(self._searches, key=lambda search: not search.queued):
            job = search.next() if self._left > 0 else None
            if job is not None:
                self._searches.remove(search)
                self._searches.append(search)
                self._left -= len(job.arms)
                return job if self._left >= 0 else None
        return None

    def done(self, job: Job, measurements: Sequence[Measurement]) -> None:
        """Learn from the results of `job`."""
        self._of[job.point.name].done(job, measurements)

    def remaining(self) -> int:
        """Jobs that are certain: the coarse ones that are left, and some of refinement."""
        jobs = sum(search.remaining() for search in self._searches)
        return max(min(jobs, ceil(self._left / 2)), 0)


@dataclass(slots=True)
class _PlacedBatch:
    """A batch, and where it lies among others."""

    batch: Batch
    regime: int
    place: tuple[float, ...]
    """Its coordinates, in octaves."""
    features: frozenset[int]
    """Numbers of its features that are not 0."""
    weight: float = 0.0
    """Of a batch of the sample: its share."""
    nearest: float = inf
    """Of a batch of the sample: octaves to the nearest batch that is measured or in the queue."""
    regret: float = 0.0
    """Of a batch of the sample: its expected regret, summed over the questions."""

    @classmethod
    def of(cls, features: FeatureFunctions, batch: Batch, weight: float = 0.0) -> _PlacedBatch:
        at = features.position(batch)
        present = frozenset(i for i, value in enumerate(at.features) if value)
        return cls(batch, at.regime, at.coordinates, present, weight)


class _PointSearch:
    """The adaptive search of one point."""

    def __init__(
        self, point: Point, setting: Setting, stored: Sequence[Measurement], target: float,
        trace: Sequence[WeightedBatch], seed: int,
    ) -> None:  # fmt: skip
        self.point, self._setting, self._target = point, setting, target
        self._features = point.features(setting)
        self._arms = tuple(point.candidates(setting))
        self._rows = {(r.batch, r.arm): r for r in stored if r.point == point.name}
        grid = point.grid(setting)
        traced = most_frequent(point, grid, trace)
        self._candidates = self._with_a_choice([*grid, *(batch for batch, _ in traced)])
        """Batches that may still be measured, by their text."""
        self.size = sum(len(self._allowed(placed.batch)) for placed in self._candidates.values())
        """Measurements that all candidates would take."""
        self.stored = sum(word in self._candidates for word, _ in self._rows)
        """How many of them are stored already."""
        self._sample = list(self._draw_sample(traced, seed))
        self._lowest_regret, self._batches_since_lowest = inf, 0
        self._new_results = True
        """Whether a job has ended since the latest fit."""
        self._ended = False
        self._measured: list[_PlacedBatch] = []
        """Batches that are measured or in the queue."""
        self._unfinished: list[Batch] = []
        """Batches of which an earlier run measured some arms only."""
        for word in {batch for batch, _ in self._rows} & self._candidates.keys():
            placed = self._candidates.pop(word)
            self._add_measured(placed)
            if self._missing(placed.batch):
                self._unfinished.append(placed.batch)
        self._queue = deque(self._coarse())

    @property
    def queued(self) -> int:
        """Measurements that the jobs in the queue take."""
        return sum(len(job.arms) for job in self._queue)

    def next(self) -> Job | None:
        """The next job, or None when the search has ended or waits for results."""
        while True:
            if not self._queue and self._new_results:
                self._refine()
            if not self._queue:
                return None
            job = self._queue.popleft()
            if job.arms:
                return job

    def done(self, job: Job, measurements: Sequence[Measurement]) -> None:
        """Add the rows."""
        self._batches_since_lowest, self._new_results = self._batches_since_lowest + 1, True
        for row in measurements:
            self._rows[row.batch, row.arm] = row

    def remaining(self) -> int:
        """Jobs in the queue, and those before the search may give up."""
        goes_on = self._candidates and not self._ended
        more = max(_PATIENCE - self._batches_since_lowest, 0) if goes_on else 0
        return len(self._queue) + more

    # --- batches

    def _with_a_choice(self, batches: Iterable[Batch]) -> dict[str, _PlacedBatch]:
        """The batches on which at least two arms may run, by their text."""
        return {
            str(batch): _PlacedBatch.of(self._features, batch)
            for batch in batches
            if len(self._allowed(batch)) > 1
        }

    def _allowed(self, batch: Batch) -> list[Arm]:
        return [arm for arm in self._arms if arm.allowed(batch, self._setting) is None]

    def _missing(self, batch: Batch) -> tuple[Arm, ...]:
        """Arms that may run on `batch` and have no row."""
        word = str(batch)
        return tuple(arm for arm in self._allowed(batch) if (word, arm.name) not in self._rows)

    def _draw_sample(self, traced: Sequence[WeightedBatch], seed: int) -> Iterator[_PlacedBatch]:
        """Random batches of the point, and the trace's batches. The weights sum up to 1."""
        random, count = Random(f"{self.point.name} {seed}"), 0
        share = (1 - _TRACE_SHARE) if traced else 1.0
        for _ in range(8 * _SAMPLED):
            batch = self.point.sample(self._setting, random)
            if len(self._allowed(batch)) > 1:
                count += 1
                yield _PlacedBatch.of(self._features, batch, share / _SAMPLED)
            if count == _SAMPLED:
                break
        total = sum(weight for _, weight in traced)
        for batch, weight in traced:
            if len(self._allowed(batch)) > 1:
                part = _TRACE_SHARE * weight / total
                yield _PlacedBatch.of(self._features, batch, part)

    def _add_measured(self, placed: _PlacedBatch) -> None:
        """`placed` is measured, or put into the queue."""
        self._measured.append(placed)
        for drawn in self._sample:
            if drawn.regime == placed.regime:
                drawn.nearest = min(drawn.nearest, dist(drawn.place, placed.place))

    # --- coarse

    def _coarse(self) -> Iterator[Job]:
        """Candidates far from each other and from measured batches; regimes take turns. Then those
        that a feature is missing from: what it costs cannot be fitted without."""
        regimes: dict[int, list[_PlacedBatch]] = {}
        for placed in self._candidates.values():
            regimes.setdefault(placed.regime, []).append(placed)
        ranked: list[tuple[int, _PlacedBatch]] = []
        for regime, candidates in sorted(regimes.items()):
            taken = [placed for placed in self._measured if placed.regime == regime]
            wanted = ceil(_COARSE * sqrt(len(candidates) + len(taken))) - len(taken)
            places = [placed.place for placed in candidates]
            order = farthest_point_order(places, [placed.place for placed in taken])
            ahead = [candidates[i] for i in order]
            chosen = ahead[: max(wanted, 0)]
            chosen += _with_missing_features([*taken, *chosen], ahead[len(chosen) :])
            ranked += enumerate(chosen)
        for _, placed in sorted(ranked, key=lambda pair: pair[0]):
            del self._candidates[str(placed.batch)]
            self._add_measured(placed)
            yield Job(self.point, placed.batch, self._missing(placed.batch))

    # --- refinement

    def _refine(self) -> None:
        """Fit a policy, and queue the candidates that promise to lower the expected regret most."""
        self._new_results = False
        unfinished, self._unfinished = self._unfinished, []
        self._queue += (Job(self.point, batch, self._missing(batch)) for batch in unfinished)
        if self._queue:
            return
        worst = self._estimate()
        if worst < (1 - _FALL) * self._lowest_regret:
            self._lowest_regret, self._batches_since_lowest = worst, 0
        self._ended = worst <= self._target or self._batches_since_lowest >= _PATIENCE
        if self._ended:
            return
        for _ in range(_REFIT):
            word = self._most_promising()
            if word is None:
                break
            placed = self._candidates.pop(word)
            self._add_measured(placed)
            self._queue.append(Job(self.point, placed.batch, self._missing(placed.batch)))
        self._ended = not self._queue

    def _estimate(self) -> float:
        """Fit a policy, and update the expected regrets of the sample; that of its worst tenth, of
        the question where it is largest."""
        policy = Policy.fit(self.point, self._setting, self._rows.values())
        regrets: dict[str, list[tuple[float, float]]] = {}
        for drawn in self._sample:
            drawn.regret = 0.0
            for name, ranked in contenders(policy, drawn.batch).items():
                regret = expected_loss_bound(ranked)
                regrets.setdefault(name, []).append((regret, drawn.weight))
                drawn.regret += regret
        return max((tail_mean(pairs, TAIL) for pairs in regrets.values()), default=0.0)

    def _most_promising(self) -> str | None:
        """The candidate that comes nearest to the most expected regret of the sample."""
        hot = sorted(self._sample, key=lambda drawn: -drawn.regret * drawn.weight)[:_HOT]
        gains = {}
        for word, candidate in self._candidates.items():
            gain = 0.0
            for drawn in hot:
                if drawn.regime == candidate.regime:
                    distance = dist(drawn.place, candidate.place)
                    if distance < drawn.nearest:
                        share = 1 - distance / drawn.nearest if drawn.nearest < inf else 1.0
                        gain += drawn.weight * drawn.regret * share
            if gain > 0:
                gains[word] = gain
        return max(gains, key=gains.__getitem__, default=None)


def _with_missing_features(
    taken: Sequence[_PlacedBatch], candidates: Sequence[_PlacedBatch]
) -> list[_PlacedBatch]:
    """The first of `candidates` that bring each feature to as many batches as a model needs."""
    counts = Counter(chain.from_iterable(placed.features for placed in taken))
    added = []
    for placed in candidates:
        if any(counts[feature] < FEWEST for feature in placed.features):
            counts.update(placed.features)
            added.append(placed)
    return added
