"""Policy: the measurements of one key and one point, compiled for decisions and for estimates.

A decision is made from a batch's sums: hard limits first, then the arms' cost models. An estimate
of how long an arm takes comes from its surface, which also knows the measured neighbours of the
batch; surfaces are made when first asked for. On a sheet where the cost models choose badly among
what was measured, the surfaces decide.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from nsa_tune.backend.costmodel.compiling import Compiled, behind_a_cliff, compiled, own_rows
from nsa_tune.backend.costmodel.model import CostModel, Failures
from nsa_tune.backend.costmodel.surface import Estimate, SharedPlaces, Surface, features_of
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.records import Measurement, Status

if TYPE_CHECKING:
    from nsa_tune.backend.types.point import Guard, Point, Setting

__all__ = ["Candidate", "Policy", "Survey"]

_log = logging.getLogger(__name__)


class Survey(NamedTuple):
    """How the arms that this device could run stand on one batch; each is in one of the three."""

    latencies: dict[str, float | None]
    """Allowed arms with what the models say they cost, to compare by; None where too little was
    measured."""
    refused: dict[str, str]
    """Arms that a guard forbids, and why."""
    failed: dict[str, str]
    """Arms that gave a wrong output or failed when they were measured, and how."""


class Candidate(NamedTuple):
    """An arm that this device could run."""

    name: str
    guards: tuple[Guard, ...]
    models: Mapping[int, CostModel]
    failures: Failures | None
    surcharge_us: Callable[[Batch, Setting], float] | None

    def cost_us(self, sheet: int, terms: Sequence[float], batch: Batch, setting: Setting) -> float:
        """The time by the model of this sheet, with what a cliff adds."""
        return self.models[sheet].latency_us(terms) + self.more_us(batch, setting)

    def more_us(self, batch: Batch, setting: Setting) -> float:
        """What a cliff adds."""
        return 0.0 if self.surcharge_us is None else self.surcharge_us(batch, setting)

    def refusal(self, batch: Batch, setting: Setting) -> str | None:
        """Which guard forbids the arm on `batch`, in its own words."""
        for guard in self.guards:
            reason = guard.check(batch, setting)
            if reason is not None:
                return reason
        return None


class Policy:
    """The compiled measurements of one point in one setting. Immutable."""

    def __init__(
        self,
        point: Point,
        setting: Setting,
        compiled: Compiled,
        rows: Callable[[], Iterable[Measurement]],
    ) -> None:
        """`rows` gives the measurements when an estimate is first asked for."""
        self.point = point
        self.setting = setting
        self.compiled = compiled
        self._rows = rows
        self.places: SharedPlaces = {}
        """Where surfaces look for places; policies of the same batches may have one in common."""
        self.candidates = tuple(
            Candidate(
                arm.name,
                arm.guards,
                compiled.models.get(arm.name, {}),
                compiled.failures.get(arm.name),
                arm.surcharge_us,
            )
            for arm in point.candidates(setting)
        )
        """The arms that this device could run, in declared order."""

    @classmethod
    def compile(cls, point: Point, setting: Setting, measurements: Iterable[Measurement]) -> Policy:
        """The policy of `point`; rows of other points and of arms it does not know are left out.

        Of several rows for one batch and arm the last counts.

        Raises:
            StoreCorrupt: when a row's batch cannot be read.
        """
        rows = own_rows(point, measurements)
        return cls(point, setting, compiled(point, setting, rows), lambda: rows)

    def survey(self, batch: Batch) -> Survey:
        """Which arms may run on `batch`, guards first, and what they cost by its sums."""
        setting = self.setting
        sheet, costs = self._placed(batch)
        kin = None if sheet is None else self.point.kin(sheet)
        latencies: dict[str, float | None] = {}
        refused: dict[str, str] = {}
        failed: dict[str, str] = {}
        for candidate in self.candidates:
            name, failures = candidate.name, candidate.failures
            if (reason := candidate.refusal(batch, setting)) is not None:
                refused[name] = reason
            elif failures and kin is not None and (reason := failures.reason(kin, batch)):
                failed[name] = reason
            else:
                latencies[name] = costs.get(name)
        return Survey(latencies, refused, failed)

    def _placed(self, batch: Batch) -> tuple[int | None, Mapping[str, float | None]]:
        """The sheet of a batch, and what each candidate costs there; none, with a warning, where
        the point cannot place it: an engine must go on."""
        try:
            sheet = self.point.sheet(batch, self.setting)
            if sheet in self.compiled.by_surfaces:
                return sheet, self._by_surfaces(batch)
            terms = self.point.cost_terms(batch, self.setting)
            return sheet, {
                one.name: one.cost_us(sheet, terms, batch, self.setting)
                for one in self.candidates
                if sheet in one.models
            }
        except (ArithmeticError, ValueError) as error:
            _log.warning("%s cannot place %s: %s", self.point.name, batch, error)
            return None, {}

    def _by_surfaces(self, batch: Batch) -> dict[str, float | None]:
        features = features_of(self.point, batch, self.setting)
        found: dict[str, float | None] = {}
        for one in self.candidates:
            surface = self.surfaces.get(one.name)
            time_us = None if surface is None else surface.latency_us(features)
            if time_us is not None:
                found[one.name] = time_us + one.more_us(batch, self.setting)
        return found

    def estimates(self, batch: Batch) -> dict[str, Estimate]:
        """Each arm's time on `batch`, whether a guard allows it or not; in declared order.

        An arm with too few measurements is left out.
        """
        try:
            features = features_of(self.point, batch, self.setting)
        except (ArithmeticError, ValueError):
            return {}
        found: dict[str, Estimate] = {}
        for arm in self.point.arms:
            surface = self.surfaces.get(arm.name)
            estimate = None if surface is None else surface.estimate_at(features)
            if estimate is not None:
                more_us = arm.surcharge_us(batch, self.setting) if arm.surcharge_us else 0.0
                found[arm.name] = estimate.plus(more_us)
        return found

    def spread(self, arm: str) -> float:
        """Relative error of the arm's surface between measured points, by leaving each out.

        Infinite for an arm without a surface.
        """
        surface = self.surfaces.get(arm)
        return inf if surface is None else surface.spread

    def rows_used(self, arm: str, batch: Batch) -> list[tuple[Measurement, float]]:
        """The measurements that the arm's estimate on `batch` is made of, with their weights."""
        surface = self.surfaces.get(arm)
        if surface is None:
            return []
        try:
            return surface.rows_used(features_of(self.point, batch, self.setting))
        except (ArithmeticError, ValueError):
            return []

    @cached_property
    def rows(self) -> tuple[Measurement, ...]:
        """The point's measurements, sorted."""
        return tuple(own_rows(self.point, self._rows()))

    @cached_property
    def measured(self) -> tuple[Batch, ...]:
        """The batches on which some arm succeeded, sorted by their text."""
        texts = sorted({row.batch for row in self.rows if row.status is Status.OK})
        return tuple(map(Batch.parse, texts))

    @cached_property
    def surfaces(self) -> Mapping[str, Surface]:
        """By arm; only arms that were measured."""
        samples: dict[str, list[tuple[Batch, Measurement]]] = defaultdict(list)
        batches = {str(batch): batch for batch in self.measured}
        for row in self.rows:
            batch = batches.get(row.batch)
            # What lies behind a cliff would bend the surface before it.
            if row.status is not Status.OK or batch is None:
                continue
            if not behind_a_cliff(self.point.arm(row.arm), batch, self.setting):
                samples[row.arm].append((batch, row))
        return {
            arm: Surface.fit(self.point, self.setting, own, self.places)
            for arm, own in samples.items()
        }
