"""The adaptive sweep: few batches all over the features first, then more where it is close.

Every point is swept by itself, and they take turns. Its candidates are the point's grid and the
batches of a trace; what they are judged by is a seeded sample of the batches that the point
expects, and the trace, weighted by how often its batches occur.

1. Coarse: the candidates that lie farthest from each other, on every sheet.
2. Refinement: the policy is fitted, and each batch of the sample gets its expected regret, from the
   gap and the spreads of its estimates, which grow with the distance from what is measured. The
   candidates that come nearest to the most of that regret are next, without the arms that are out
   of the question there.
3. The end: the expected regret of the worst tenth of the sample is under the target for every
   question, or it has stopped falling. Each batch is also a test of the policy that was fitted
   without it: expected regrets are scaled by what was found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, dist, floor, inf, log, sqrt
from random import Random
from statistics import median

from nsa_tune.autotune.runner.schedule import Job
from nsa_tune.autotune.search.expected import (
    Calibration,
    Contender,
    contenders,
    expected_regret,
    realised_regret,
    tail_mean,
)
from nsa_tune.autotune.search.spacing import farthest_first
from nsa_tune.autotune.search.weights import Weighted, most_frequent
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Arm, Point, Setting
from nsa_tune.backend.types.records import Measurement, Status

__all__ = ["TAIL", "Adaptive"]

TAIL = 0.1
"""The share of batches, the worst ones, whose mean regret is to be under the target. On most
batches one arm is faster by far, and a mean over all of them would hide the others."""
_COARSE = 1.5
"""Coarse batches on a sheet, times the square root of its candidates."""
_SAMPLED = 160
_TRACE_SHARE = 0.5
"""Of the weight, for the batches of a trace."""
_SHARE, _SHARE_AT = 0.2, 0.01
"""The most measurements, of all that the candidates would take, at this target and higher ones; a
lower target may take more in proportion."""
_FEW = 200
"""Measurements that are worth no saving: on a GPU they take three seconds."""
_REFIT = 6
"""Batches between two fits."""
_PATIENCE = 18
"""Batches after which a point is left when its expected regret has not fallen by `_FALL`."""
_FALL = 0.1
_OUT_OF_THE_QUESTION = 1.5
"""An arm that is slower by this factor, at the near ends of the intervals, is not timed again."""
_NEAR, _FAR = 0.6, 2.0
"""Limits of how much narrower and wider a spread is than the surface's, by distance."""
_HOT = 60
"""Batches of the sample, those with the highest regret, that refinement looks at."""


class Adaptive:
    """A `Schedule` that ends when the regret that is left is expected to be small enough."""

    def __init__(
        self,
        points: Sequence[Point],
        setting: Setting,
        known: Sequence[Measurement],
        *,
        target_regret: float = 0.01,
        trace: Sequence[Weighted] = (),
        seed: int = 0,
    ) -> None:
        self._sweeps = [
            _Sweep(point, setting, known, target_regret, trace, seed) for point in points
        ]
        self._of = {sweep.point.name: sweep for sweep in self._sweeps}
        share = min(_SHARE * max(_SHARE_AT / max(target_regret, 1e-9), 1.0), 1.0)
        most = max(floor(share * sum(sweep.size for sweep in self._sweeps)), _FEW)
        # Of a small grid the coarse part alone may be more.
        most -= sum(sweep.known for sweep in self._sweeps)
        self._left = max(most, sum(sweep.queued for sweep in self._sweeps))

    def next(self) -> Job | None:
        """The next job of the next point that has one."""
        # No point is refined with measurements that another's coarse part needs.
        for sweep in sorted(self._sweeps, key=lambda sweep: not sweep.queued):
            job = sweep.next() if self._left > 0 else None
            if job is not None:
                self._sweeps.remove(sweep)
                self._sweeps.append(sweep)
                self._left -= len(job.arms)
                return job if self._left >= 0 else None
        return None

    def done(self, job: Job, measurements: Sequence[Measurement]) -> None:
        """Learn from what `job` found."""
        self._of[job.point.name].done(job, measurements)

    def remaining(self) -> tuple[int, float | None]:
        """The jobs that are certain: what is left of the coarse ones, and a few of refinement."""
        jobs = sum(sweep.remaining() for sweep in self._sweeps)
        return max(min(jobs, ceil(self._left / 2)), 0), None

    def expected(self) -> dict[str, float]:
        """Each question's expected regret on the worst tenth of batches, by all that is known."""
        found: dict[str, float] = {}
        for sweep in self._of.values():
            sweep.judge()
            found |= sweep.regret
        return found


@dataclass(slots=True)
class _Site:
    """A batch, and where it lies."""

    batch: Batch
    sheet: int
    where: tuple[float, ...]
    weight: float = 0.0
    nearest: float = inf
    """Octaves to the nearest batch that is measured or about to be."""
    regret: float = 0.0

    @classmethod
    def of(cls, point: Point, setting: Setting, batch: Batch, weight: float = 0.0) -> _Site:
        return cls(batch, point.sheet(batch, setting), point.locate(batch, setting), weight)


@dataclass(frozen=True, slots=True)
class _Ground:
    """What the spread of a sheet's surfaces stands on."""

    typical: float
    """Octaves from a measured batch to the nearest other one."""
    fitted: float
    """How much too small residuals are, because weights were fitted to them."""


class _Sweep:
    """The adaptive sweep of one point."""

    def __init__(
        self, point: Point, setting: Setting, known: Sequence[Measurement], target: float,
        trace: Sequence[Weighted], seed: int,
    ) -> None:  # fmt: skip
        self.point, self._setting, self._target = point, setting, target
        self._arms = tuple(point.candidates(setting))
        self._rows = {(r.batch, r.arm): r for r in known if r.point == point.name}
        grid = point.grid(setting)
        traced = most_frequent(point, grid, trace)
        self._candidates = self._sites([*grid, *(batch for batch, _ in traced)])
        self.size = sum(len(self._open(site.batch)) for site in self._candidates.values())
        """Measurements that all candidates would take."""
        self.known = sum(word in self._candidates for word, _ in self._rows)
        """How many of them are there already."""
        self._sample = list(self._judged(traced, seed))
        self._tests: dict[str, Mapping[str, tuple[Contender, ...]]] = {}
        """What was expected of the batches that were handed out."""
        self._calibrations = {answer.name: Calibration() for answer in point.answers}
        self.regret: dict[str, float] = {}
        self._lowest, self._since = inf, 0
        self._news = True
        """Whether a job has ended since the latest fit."""
        self._over = False
        measured = {batch for batch, _ in self._rows}
        self._places: list[_Site] = []
        self._unfinished: list[Batch] = []
        """Batches of which an earlier run has some arms."""
        for word in measured & self._candidates.keys():
            site = self._candidates.pop(word)
            self._take(site)
            if self._missing(site.batch):
                self._unfinished.append(site.batch)
        self._queue = deque(self._coarse())

    @property
    def queued(self) -> int:
        """Measurements that the jobs in the queue take."""
        return sum(len(job.arms) for job in self._queue)

    def next(self) -> Job | None:
        """The next job, or None when the point is done or waits for results."""
        while True:
            if not self._queue and self._news:
                self._refine()
            if not self._queue:
                return None
            job = self._queue.popleft()
            if job.arms:
                return job

    def done(self, job: Job, measurements: Sequence[Measurement]) -> None:
        """Add the rows, and see how far the policy before them was right."""
        self._since, self._news = self._since + 1, True
        for row in measurements:
            self._rows[row.batch, row.arm] = row
        times = {
            row.arm: row.latency_us
            for row in measurements
            if row.status is Status.OK and row.latency_us is not None
        }
        tested = self._tests.pop(str(job.batch), {})
        for answer in self.point.answers:
            ranked = tested.get(answer.name)
            found = realised_regret(answer, ranked[0].arm, times) if ranked else None
            if ranked and found is not None:
                self._calibrations[answer.name].add(expected_regret(ranked), found)

    def remaining(self) -> int:
        """Jobs in the queue, and those before the point may be given up."""
        open_ended = self._candidates and not self._over
        return len(self._queue) + (max(_PATIENCE - self._since, 0) if open_ended else 0)

    # --- what there is

    def _sites(self, batches: Iterable[Batch]) -> dict[str, _Site]:
        """The batches on which at least two arms may run."""
        return {
            str(batch): _Site.of(self.point, self._setting, batch)
            for batch in batches
            if len(self._open(batch)) > 1
        }

    def _open(self, batch: Batch) -> list[Arm]:
        return [arm for arm in self._arms if arm.allowed(batch, self._setting) is None]

    def _judged(self, traced: Sequence[Weighted], seed: int) -> Iterator[_Site]:
        """The sample: random batches of the point, and the trace's."""
        random, found = Random(f"{self.point.name} {seed}"), 0
        share = (1 - _TRACE_SHARE) if traced else 1.0
        for _ in range(8 * _SAMPLED):
            batch = self.point.sample(self._setting, random)
            if len(self._open(batch)) > 1:
                found += 1
                yield _Site.of(self.point, self._setting, batch, share / _SAMPLED)
            if found == _SAMPLED:
                break
        total = sum(weight for _, weight in traced)
        for batch, weight in traced:
            if len(self._open(batch)) > 1:
                part = _TRACE_SHARE * weight / total
                yield _Site.of(self.point, self._setting, batch, part)

    def _take(self, site: _Site) -> None:
        """`site` is measured, or about to be."""
        self._places.append(site)
        for one in self._sample:
            if one.sheet == site.sheet:
                one.nearest = min(one.nearest, dist(one.where, site.where))

    def _missing(self, batch: Batch) -> tuple[Arm, ...]:
        word = str(batch)
        return tuple(arm for arm in self._open(batch) if (word, arm.name) not in self._rows)

    # --- coarse

    def _coarse(self) -> Iterator[Job]:
        """Candidates far from each other and from what is measured, sheet by sheet in turn."""
        sheets: dict[int, list[_Site]] = {}
        for site in self._candidates.values():
            sheets.setdefault(site.sheet, []).append(site)
        ranked: list[tuple[int, _Site]] = []
        for sheet, sites in sorted(sheets.items()):
            taken = [place.where for place in self._places if place.sheet == sheet]
            wanted = ceil(_COARSE * sqrt(len(sites) + len(taken))) - len(taken)
            order = farthest_first([site.where for site in sites], taken)
            ranked += [(rank, sites[i]) for rank, i in enumerate(order[: max(wanted, 0)])]
        for _, site in sorted(ranked, key=lambda pair: pair[0]):
            del self._candidates[str(site.batch)]
            self._take(site)
            yield Job(self.point, site.batch, self._missing(site.batch))

    # --- refinement

    def _refine(self) -> None:
        """Fit, estimate what is left to gain, and queue the batches that promise most of it."""
        self._news = False
        policy, grounds = self.judge()
        unfinished, self._unfinished = self._unfinished, []
        for batch in unfinished:
            if arms := self._in_question(policy, batch):
                self._queue.append(Job(self.point, batch, arms))
        if self._queue:
            return
        worst = max(self.regret.values(), default=0.0)
        if worst < (1 - _FALL) * self._lowest:
            self._lowest, self._since = worst, 0
        self._over = worst <= self._target or self._since >= _PATIENCE
        if self._over:
            return
        for _ in range(_REFIT):
            word = self._most_promising()
            if word is None:
                break
            site = self._candidates.pop(word)
            near = _nearest(site, self._places)
            wider = _wider(near, grounds.get(site.sheet))
            self._tests[word] = contenders(policy, site.batch, wider)
            self._take(site)
            arms = self._in_question(policy, site.batch) or self._missing(site.batch)
            self._queue.append(Job(self.point, site.batch, arms))
        self._over = not self._queue

    def _grounds(self) -> dict[int, _Ground]:
        """What the spreads of each sheet stand on."""
        found: dict[int, list[float]] = {}
        for place in self._places:
            found.setdefault(place.sheet, []).append(_nearest(place, self._places))
        free = len(self.point.terms) + 1
        return {
            sheet: _Ground(median(distances), sqrt(len(distances) / max(len(distances) - free, 1)))
            for sheet, distances in found.items()
        }

    def judge(self) -> tuple[Policy, Mapping[int, _Ground]]:
        """Fit, and estimate the regret of every batch of the sample and of their worst tenth."""
        policy = Policy.compile(self.point, self._setting, self._rows.values())
        grounds = self._grounds()
        found: dict[str, list[tuple[float, float]]] = {}
        for site in self._sample:
            site.regret = 0.0
            wider = _wider(site.nearest, grounds.get(site.sheet))
            for name, ranked in contenders(policy, site.batch, wider).items():
                regret = self._calibrations[name].factor * expected_regret(ranked)
                found.setdefault(name, []).append((regret, site.weight))
                site.regret += regret
        self.regret = {name: tail_mean(pairs, TAIL) for name, pairs in found.items()}
        return policy, grounds

    def _most_promising(self) -> str | None:
        """The candidate that comes nearest to the most expected regret, for what it costs."""
        hot = sorted(self._sample, key=lambda site: -site.regret * site.weight)[:_HOT]
        gains = {}
        for word, candidate in self._candidates.items():
            gain = 0.0
            for site in hot:
                if site.sheet == candidate.sheet:
                    distance = dist(site.where, candidate.where)
                    if distance < site.nearest:
                        share = 1 - distance / site.nearest if site.nearest < inf else 1.0
                        gain += site.weight * site.regret * share
            if gain > 0:
                gains[word] = gain
        return max(gains, key=gains.__getitem__, default=None)

    def _in_question(self, policy: Policy, batch: Batch) -> tuple[Arm, ...]:
        """The arms that are missing on `batch` and in the question there."""
        estimates = policy.estimates(batch)
        missing = self._missing(batch)
        names = {arm.name for arm in self._open(batch)}
        wanted: set[str] = set()
        for answer in self.point.answers:
            arms = [a for of in answer.choices.values() for a in of if a in names]
            if any(arm not in estimates for arm in arms):
                wanted.update(arms)
            elif len(arms) > 1:
                limit = log(min(estimates[arm].high_us for arm in arms) * _OUT_OF_THE_QUESTION)
                close = [arm for arm in arms if log(estimates[arm].low_us) < limit]
                wanted.update(close if len(close) > 1 else ())
        return tuple(arm for arm in missing if arm.name in wanted)


def _nearest(site: _Site, places: Sequence[_Site]) -> float:
    return min(
        (
            dist(site.where, place.where)
            for place in places
            if place.sheet == site.sheet and place is not site
        ),
        default=inf,
    )


def _wider(nearest: float, ground: _Ground | None) -> float:
    """How much wider than the surface's a spread is so far from what is measured."""
    if ground is None or ground.typical == inf:
        return _FAR
    distance = min(max(nearest / (ground.typical or inf), _NEAR), _FAR)
    return distance * min(ground.fitted, _FAR)
