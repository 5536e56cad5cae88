"""Policy: the measurements of one key and one point, fitted for decisions and for estimates.

A decision is made from a batch's sums: hard limits first, then the arms' latency models. An
estimate of how long an arm takes comes from its surface, which also knows the measured neighbours
of the batch; surfaces are made when first asked for.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import takewhile
from math import exp, inf
from typing import NamedTuple, Self

from nsa_tune._errors import NsaTuneError
from nsa_tune.backend.costmodel.fitting import Fitted, behind_a_cliff, fitted, own_rows
from nsa_tune.backend.costmodel.model import Failures, LatencyModel
from nsa_tune.backend.costmodel.regret import MARGIN, NARROW
from nsa_tune.backend.costmodel.surface import Estimate, SharedPlaces, Surface
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import (
    Arm,
    FeatureFunctions,
    Guard,
    Limit,
    Point,
    Position,
    Question,
    Setting,
)
from nsa_tune.backend.types.records import Measurement, Status

_log = logging.getLogger(__name__)


class Survey(NamedTuple):
    """How the arms that this device could run stand on one batch; each is in one of the two."""

    latencies: dict[str, float | None]
    """Allowed arms with what the models say they cost, to compare by; None where too little was
    measured."""
    forbidden: dict[str, str]
    """Arms that a guard forbids, or that gave a wrong output or failed when they were measured, and
    why."""
    margin: float = MARGIN
    """Latencies this close, relatively, count as equal."""


class Candidate(NamedTuple):
    """An arm that this device could run."""

    name: str
    guards: tuple[Guard, ...]
    limits: tuple[Limit, ...]
    """What the guards come to in the policy's setting, without those that all arms begin with."""
    models: Mapping[int, LatencyModel]
    """By regime."""
    failures: Failures | None
    surcharge: Callable[[Batch], float] | None
    """Microseconds that a cliff adds; None where there is none."""


class Part(NamedTuple):
    """The arms that answer some of a point's questions."""

    candidates: tuple[Candidate, ...]
    features: Callable[[Batch], tuple[float, ...]]
    """Those that their models depend on; others may be 0."""


def _limits(guards: Iterable[Guard], setting: Setting) -> Iterator[Limit]:
    """What the guards come to; none behind one that forbids every batch."""
    for guard in guards:
        limit = guard.limit(setting)
        if isinstance(limit, str):
            yield partial(_always, limit)
            return
        if limit is not None:
            yield limit


def _shared(guards: Sequence[tuple[Guard, ...]]) -> list[Guard]:
    """The guards that all arms begin with: those are asked once for a batch."""
    same = takewhile(lambda some: len(set(some)) == 1, zip(*guards, strict=False))
    return [some[0] for some in same]


def _always(reason: str, batch: Batch) -> str:
    del batch
    return reason


class Policy:
    """The fitted measurements of one point in one setting. Immutable."""

    def __init__(
        self,
        point: Point,
        setting: Setting,
        features: FeatureFunctions,
        fitted: Fitted,
        rows: Callable[[], Iterable[Measurement]],
    ) -> None:
        """`rows` gives the measurements as they were taken, when first an estimate is asked for."""
        self.point = point
        self.setting = setting
        self.features = features
        self.fitted = fitted
        self._rows = rows
        self.places: SharedPlaces = {}
        """Where surfaces look for places; policies of the same batches may have one in common."""
        arms = list(self.point.candidates(self.setting))
        shared = _shared([arm.guards for arm in arms])
        self._limits = tuple(_limits(shared, self.setting))
        self.candidates = tuple(self._candidate(arm, len(shared)) for arm in arms)
        """The arms that this device could run, in declared order."""
        self._whole = Part(self.candidates, features.features)
        self.choices = {
            question.name: [
                (choice, own)
                for choice, names in question.choices.items()
                if (own := [arm.name for arm in arms if arm.name in names])
            ]
            for question in self.point.questions
        }
        """By question, the choices that one of these arms answers, with those arms."""

    def _candidate(self, arm: Arm, shared: int) -> Candidate:
        return Candidate(
            arm.name,
            arm.guards,
            tuple(_limits(arm.guards[shared:], self.setting)),
            self.fitted.models.get(arm.name, {}),
            self.fitted.failures.get(arm.name),
            None if arm.surcharge is None else arm.surcharge(self.setting),
        )

    @classmethod
    def fit(cls, point: Point, setting: Setting, measurements: Iterable[Measurement]) -> Self:
        """The policy of `point`; rows of other points and of arms it does not know are left out.

        Of several rows for one batch and arm the last counts.

        Raises:
            StoreCorrupt: when a row's batch cannot be read.
        """
        features, kept = point.features(setting), tuple(measurements)
        rows = own_rows(point, setting.sharing, kept)
        return cls(point, setting, features, fitted(point, setting, features, rows), lambda: kept)

    def at(self, setting: Setting) -> Policy:
        """This policy's models for batches in `setting`, of which some features differ."""
        features = self.point.features(setting)
        return Policy(self.point, setting, features, self.fitted, self._rows)

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The arms that this device could run, that never failed, and that were measured too little
        for a latency model, or not at all."""
        return tuple(arm.name for arm in self.candidates if not arm.models and arm.failures is None)

    def part(self, questions: Iterable[Question]) -> Part:
        """What the answers to `questions` depend on."""
        choices = (choice for question in questions for choice in self.choices[question.name])
        arms = {arm for _, own in choices for arm in own}
        some = tuple(one for one in self.candidates if one.name in arms)
        # Which models are corrected, and by how much, depends on all features.
        if self.features.some is None or self.fitted.residuals:
            return Part(some, self.features.features)
        models = [model for one in some for model in one.models.values()]
        names = (self.features.names[i] for model in models for i in model.used)
        return Part(some, self.features.some(frozenset(names)))

    def survey(self, batch: Batch) -> Survey:
        """Which arms may run on `batch`, guards first, and what they cost."""
        return self.survey_of(self._whole, batch)

    def survey_of(self, part: Part, batch: Batch) -> Survey:
        """`survey` of these arms alone."""
        candidates, features_of = part
        regime, features = self._placed(batch, features_of)
        group = None if regime is None else self.point.regime_group(regime)
        latencies: dict[str, float | None] = {}
        forbidden: dict[str, str] = {}
        for limit in self._limits:
            if (reason := limit(batch)) is not None:
                return Survey({}, dict.fromkeys([arm.name for arm in candidates], reason))
        residuals = None if regime is None else self.fitted.residuals.get(regime)
        missed = residuals.corrections(features) if residuals else {}
        # Each call in this loop is a part of every plan's time.
        for name, _, limits, models, failures, surcharge in candidates:
            for limit in limits:
                reason = limit(batch)
                if reason is not None:
                    forbidden[name] = reason
                    break
            else:
                if failures and group is not None and (reason := failures.reason(group, batch)):
                    forbidden[name] = reason
                    continue
                model = None if regime is None else models.get(regime)
                cost = None if model is None else model.latency_us(features)
                if missed and cost is not None:
                    cost *= exp(missed[name])
                latencies[name] = cost if not surcharge or cost is None else cost + surcharge(batch)
        return Survey(latencies, forbidden, NARROW if missed else MARGIN)

    def _placed(
        self, batch: Batch, features: Callable[[Batch], tuple[float, ...]]
    ) -> tuple[int | None, tuple[float, ...]]:
        """The regime and the features of a batch; none, with a warning, where the point cannot
        place it: an engine must go on."""
        try:
            return self.features.regime(batch), features(batch)
        except (ArithmeticError, ValueError) as error:
            _log.warning("%s cannot place %s: %s", self.point.name, batch, error)
            return None, ()

    def estimates(self, batch: Batch) -> dict[str, Estimate]:
        """Each arm's time on `batch`, whether a guard allows it or not; in declared order.

        An arm with too few measurements is left out.
        """
        at = self._position(batch)
        estimates: dict[str, Estimate] = {}
        for arm in self.point.arms:
            surface = self.surfaces.get(arm.name)
            estimate = None if surface is None or at is None else surface.estimate(at)
            if estimate is not None:
                estimates[arm.name] = estimate.plus(arm.surcharge_us(batch, self.setting))
        return estimates

    def times_us(self, batch: Batch, arms: Collection[str]) -> dict[str, float] | None:
        """What estimates say of those of `arms` that a survey allows, in less time; None where it
        allows no arm at all.

        In declared order; an arm with too few measurements is left out.
        """
        at = self._position(batch)
        group = None if at is None else self.point.regime_group(at.regime)
        if any(limit(batch) is not None for limit in self._limits):
            return None
        allowed, times = False, dict[str, float]()
        for name, _, limits, _, failures, surcharge in self.candidates:
            if any(limit(batch) is not None for limit in limits):
                continue
            if failures and group is not None and failures.reason(group, batch):
                continue
            allowed, surface = True, self.surfaces.get(name) if name in arms else None
            us = None if surface is None or at is None else surface.latency_us(at)
            if us is not None:
                times[name] = us if surcharge is None else us + surcharge(batch)
        return times if allowed else None

    def spread(self, arm: str) -> float:
        """Relative error of the arm's surface between measured points, by leaving each out.

        Infinite for an arm without a surface.
        """
        surface = self.surfaces.get(arm)
        return inf if surface is None else surface.spread

    def rows_used(self, arm: str, batch: Batch) -> list[tuple[Measurement, float]]:
        """The measurements that the arm's estimate on `batch` is made of, with their weights."""
        surface, at = self.surfaces.get(arm), self._position(batch)
        return [] if surface is None or at is None else surface.rows_used(at)

    def _position(self, batch: Batch) -> Position | None:
        try:
            return self.features.position(batch)
        except (ArithmeticError, ValueError):
            return None

    @cached_property
    def rows(self) -> tuple[Measurement, ...]:
        """The point's measurements, sorted; each has a layer's share of the cost of a pass."""
        return tuple(own_rows(self.point, self.setting.sharing, self._rows()))

    @cached_property
    def measured(self) -> tuple[Batch, ...]:
        """The batches on which some arm succeeded, sorted by their text."""
        texts = sorted({row.batch for row in self.rows if row.status is Status.OK})
        return tuple(map(Batch.parse, texts))

    @cached_property
    def surfaces(self) -> Mapping[str, Surface]:
        """By arm; only arms that were measured."""
        samples: dict[str, list[tuple[Batch, Measurement]]] = defaultdict(list)
        try:
            batches = {str(batch): batch for batch in self.measured}
        except NsaTuneError as error:
            # An engine that has a plan goes on, though the file has gone since.
            _log.warning("%s has no estimates: %s", self.point.name, error)
            return {}
        for row in self.rows:
            batch = batches.get(row.batch)
            # What lies behind a cliff would bend the surface before it.
            if row.status is not Status.OK or batch is None:
                continue
            if not behind_a_cliff(self.point.arm(row.arm), batch, self.setting):
                samples[row.arm].append((batch, row))
        return {
            arm: Surface.fit(self.features, self.point.arm(arm), rows, self.places)
            for arm, rows in samples.items()
        }
