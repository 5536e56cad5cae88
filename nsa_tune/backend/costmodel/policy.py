"""Policy: the measurements of one key and one point, fitted for decisions and for estimates.

A decision is made from a batch's sums: hard limits first, then the arms' latency models. An
estimate of how long an arm takes comes from its surface, which also knows the measured neighbours
of the batch; surfaces are made when first asked for.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import exp, inf
from typing import NamedTuple, Self, TypeAlias

from nsa_tune._errors import NsaTuneError
from nsa_tune.backend.costmodel.fitting import Fitted, behind_a_cliff, fitted, own_rows
from nsa_tune.backend.costmodel.model import Failures, LatencyModel
from nsa_tune.backend.costmodel.regret import MARGIN, NARROW
from nsa_tune.backend.costmodel.surface import Estimate, SharedPlaces, Surface
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import (
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
    models: Mapping[int, LatencyModel]
    """By regime."""
    failures: Failures | None
    surcharge: Callable[[Batch], float] | None
    """Microseconds that a cliff adds; None where there is none."""


_Time: TypeAlias = Callable[[Sequence[float]], float]
"""Microseconds by the features of a batch."""


class _Costs(NamedTuple):
    """What allowed arms of a regime cost."""

    features: Callable[[Batch], tuple[float, ...]]
    """Those that their models depend on; others may be 0."""
    arms: tuple[tuple[str, _Time | None, Callable[[Batch], float] | None], ...]
    """Each with its model's function and its surcharge."""


@dataclass(frozen=True, slots=True)
class Part:
    """The arms that answer some of a point's questions."""

    candidates: tuple[Candidate, ...]
    limits: tuple[tuple[Limit, tuple[str, ...]], ...]
    """Each limit with the arms that have it: what many have is asked once for a batch."""
    costs: dict[tuple[int, tuple[str, ...]], _Costs] = field(default_factory=dict)
    """Costs by regime and what is forbidden, as far as batches have asked for them."""

    def forbidden(self, batch: Batch) -> dict[str, str]:
        """The arms that must not run on a batch, and why."""
        found: dict[str, str] = {}
        for limit, arms in self.limits:
            reason = limit(batch)
            if reason is not None:
                for arm in arms:
                    found.setdefault(arm, reason)
                if len(found) == len(self.candidates):
                    break
        return found


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
        self.candidates = tuple(
            Candidate(
                arm.name,
                arm.guards,
                fitted.models.get(arm.name, {}),
                fitted.failures.get(arm.name),
                None if arm.surcharge is None else arm.surcharge(setting),
            )
            for arm in arms
        )
        """The arms that this device could run, in declared order."""
        self._whole = self._part(self.candidates)
        self.choices = {
            question.name: [
                (choice, own)
                for choice, names in question.choices.items()
                if (own := [arm.name for arm in arms if arm.name in names])
            ]
            for question in self.point.questions
        }
        """By question, the choices that one of these arms answers, with those arms."""

    def _part(self, some: tuple[Candidate, ...]) -> Part:
        guards: list[Guard] = []
        for one in some:
            at = 0
            # In each arm's own order, so that the first that forbids it gives the reason.
            for guard in one.guards:
                if guard not in guards:
                    guards.insert(at, guard)
                at = guards.index(guard) + 1
        limits: list[tuple[Limit, tuple[str, ...]]] = []
        for guard in guards:
            limit = guard.limit(self.setting)
            if isinstance(limit, str):
                limit = partial(_always, limit)
            if limit is not None:
                limits.append((limit, tuple(one.name for one in some if guard in one.guards)))
        failures = [(one.failures, (one.name,)) for one in some if one.failures is not None]
        limits += [(partial(self._failed, failed), arm) for failed, arm in failures]
        return Part(some, tuple(limits))

    def _failed(self, failures: Failures, batch: Batch) -> str | None:
        return failures.reason(self.point.regime_group(self.features.regime(batch)), batch)

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
        """The arms that the answers to `questions` depend on."""
        choices = (choice for question in questions for choice in self.choices[question.name])
        arms = {arm for _, own in choices for arm in own}
        return self._part(tuple(one for one in self.candidates if one.name in arms))

    def survey(self, batch: Batch) -> Survey:
        """Which arms may run on `batch`, guards first, and what they cost."""
        return self.survey_of(self._whole, batch)

    def survey_of(self, part: Part, batch: Batch) -> Survey:
        """`survey` of these arms alone."""
        forbidden = part.forbidden(batch)
        if len(forbidden) == len(part.candidates):
            return Survey({}, forbidden)
        try:
            regime = self.features.regime(batch)
            place = regime, tuple(forbidden)
            features_of, arms = part.costs.get(place) or self._costs(part, place)
            features = features_of(batch)
        except (ArithmeticError, ValueError) as error:
            # An engine must go on.
            _log.warning("%s cannot place %s: %s", self.point.name, batch, error)
            allowed = [one.name for one in part.candidates if one.name not in forbidden]
            return Survey(dict.fromkeys(allowed), forbidden)
        residuals = self.fitted.residuals.get(regime)
        missed = residuals.corrections(features) if residuals else {}
        # Each call in this loop is a part of every plan's time.
        latencies: dict[str, float | None] = {}
        for name, time_of, surcharge in arms:
            cost = None if time_of is None else time_of(features)
            if missed and cost is not None:
                cost *= exp(missed[name])
            latencies[name] = cost if not surcharge or cost is None else cost + surcharge(batch)
        return Survey(latencies, forbidden, NARROW if missed else MARGIN)

    def _costs(self, part: Part, place: tuple[int, tuple[str, ...]]) -> _Costs:
        """What the arms that are not forbidden cost in a regime."""
        regime, forbidden = place
        arms = [one for one in part.candidates if one.name not in forbidden]
        models = [one.models.get(regime) for one in arms]
        features = self.features.features
        # Which models are corrected, and by how much, depends on all features.
        if self.features.some is not None and not self.fitted.residuals:
            used = [i for model in models if model is not None for i in model.used]
            features = self.features.some(frozenset(self.features.names[i] for i in used))
        times = [
            (one.name, None if model is None else model.latency_us, one.surcharge)
            for one, model in zip(arms, models, strict=True)
        ]
        costs = part.costs[place] = _Costs(features, tuple(times))
        return costs

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
        forbidden = self._whole.forbidden(batch)
        if len(forbidden) == len(self.candidates):
            return None
        at, times = self._position(batch), dict[str, float]()
        for name, *_, surcharge in self.candidates:
            if name in arms and name not in forbidden:
                surface = self.surfaces.get(name)
                us = None if surface is None or at is None else surface.latency_us(at)
                if us is not None:
                    times[name] = us if surcharge is None else us + surcharge(batch)
        return times

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
