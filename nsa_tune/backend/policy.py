"""Policy: the measurements of one key and one point, compiled for lookup."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from math import dist, inf
from typing import TYPE_CHECKING, NamedTuple

from nsa_tune._errors import BatchError, StoreCorrupt
from nsa_tune.backend.batch import Batch
from nsa_tune.backend.records import Measurement, Status
from nsa_tune.backend.surface import Estimate, Features, Places, Surface, features_of

if TYPE_CHECKING:
    from nsa_tune.backend.point import Point, Setting

__all__ = ["Policy", "Survey"]

_log = logging.getLogger(__name__)


class Survey(NamedTuple):
    """How the arms that this device could run stand on one batch; each is in one of the three."""

    latencies: dict[str, float | None]
    """Allowed arms with their estimated microseconds; None where too little was measured."""
    refused: dict[str, str]
    """Arms that a guard forbids, and why."""
    failed: dict[str, str]
    """Arms that gave a wrong output or failed when they were measured, and how."""


class _Attempt(NamedTuple):
    """One measurement of an arm that did not always succeed."""

    where: tuple[float, ...]
    batch: str
    failure: str | None


class _Failures:
    """What is known of an arm that failed somewhere."""

    def __init__(self, wrong: str | None, attempts: Mapping[int, list[_Attempt]]) -> None:
        self._wrong = wrong
        self._attempts = attempts

    def near(self, features: Features) -> str | None:
        """Why the arm must not run there: wrong somewhere, or failed on the nearest batch."""
        if self._wrong is not None:
            return self._wrong
        attempts = self._attempts.get(features.sheet)
        if not attempts:
            return None
        # Of a success and a failure equally near, the failure counts.
        nearest = min(
            attempts, key=lambda one: (dist(one.where, features.where), one.failure is None)
        )
        return nearest.failure and f"failed on {nearest.batch}: {nearest.failure}"


class _Candidate(NamedTuple):
    name: str
    checks: tuple[Callable[[Batch, Setting], str | None], ...]
    surface: Surface | None
    failures: _Failures | None
    surcharge_us: Callable[[Batch, Setting], float] | None


class Policy:
    """The compiled measurements of one point in one setting. Immutable."""

    def __init__(
        self,
        point: Point,
        setting: Setting,
        surfaces: Mapping[str, Surface],
        failures: Mapping[str, _Failures],
        measured: tuple[Batch, ...],
    ) -> None:
        self.point = point
        self.setting = setting
        self.measured = measured
        """The batches on which some arm succeeded, sorted by their text."""
        self._surfaces = dict(surfaces)
        self._candidates = tuple(
            _Candidate(
                arm.name,
                tuple(guard.check for guard in arm.guards),
                surfaces.get(arm.name),
                failures.get(arm.name),
                arm.surcharge_us,
            )
            for arm in point.candidates(setting)
        )

    @classmethod
    def compile(cls, point: Point, setting: Setting, measurements: Iterable[Measurement]) -> Policy:
        """The policy of `point`; rows of other points and of arms it does not know are left out.

        Of several rows for one batch and arm the last counts.

        Raises:
            StoreCorrupt: when a row's batch cannot be read.
        """
        known = {arm.name for arm in point.arms}
        rows = {
            (row.arm, row.batch): row
            for row in measurements
            if row.point == point.name and row.arm in known
        }
        batches = {text: _parsed(point, text) for text in sorted({text for _, text in rows})}
        shared: dict[tuple[tuple[float, ...], ...], Places] = {}
        surfaces: dict[str, Surface] = {}
        failures: dict[str, _Failures] = {}
        measured: set[str] = set()
        for arm in sorted({arm for arm, _ in rows}):
            own = [(batches[text], row) for (name, text), row in rows.items() if name == arm]
            passed = [(batch, row) for batch, row in own if row.status is Status.OK]
            measured.update(row.batch for _, row in passed)
            # What lies behind a cliff would bend the surface before it.
            more_us = point.arm(arm).surcharge_us
            smooth = [one for one in passed if more_us is None or not more_us(one[0], setting)]
            surfaces[arm] = Surface.fit(point, setting, smooth, shared)
            if len(passed) < len(own):
                failures[arm] = _failures_of(point, setting, own)
        return cls(
            point, setting, surfaces, failures, tuple(batches[text] for text in sorted(measured))
        )

    def survey(self, batch: Batch) -> Survey:
        """Which arms may run on `batch`, guards first, and what they are estimated to take."""
        features = self._features(batch)
        setting = self.setting
        latencies: dict[str, float | None] = {}
        refused: dict[str, str] = {}
        failed: dict[str, str] = {}
        for name, checks, surface, failures, surcharge_us in self._candidates:
            for check in checks:
                reason = check(batch, setting)
                if reason is not None:
                    refused[name] = reason
                    break
            else:
                if features is None or surface is None:
                    latencies[name] = None
                elif failures is not None and (reason := failures.near(features)) is not None:
                    failed[name] = reason
                else:
                    latency_us = surface.latency_us(features)
                    if latency_us is not None and surcharge_us is not None:
                        latency_us += surcharge_us(batch, setting)
                    latencies[name] = latency_us
        return Survey(latencies, refused, failed)

    def estimates(self, batch: Batch) -> dict[str, Estimate]:
        """Each arm's time on `batch`, whether a guard allows it or not; in declared order.

        An arm with too few measurements is left out.
        """
        features = self._features(batch)
        found: dict[str, Estimate] = {}
        for arm in self.point.arms:
            surface = self._surfaces.get(arm.name)
            if features is not None and surface is not None:
                estimate = surface.estimate_at(features)
                if estimate is not None:
                    more_us = arm.surcharge_us(batch, self.setting) if arm.surcharge_us else 0.0
                    found[arm.name] = estimate.plus(more_us)
        return found

    def spread(self, arm: str) -> float:
        """Relative error of the arm's surface between measured points, by leaving each out.

        Infinite for an arm without a surface.
        """
        surface = self._surfaces.get(arm)
        return inf if surface is None else surface.spread

    def _features(self, batch: Batch) -> Features | None:
        """None, with a warning, where the point cannot place the batch: an engine must go on."""
        try:
            return features_of(self.point, batch, self.setting)
        except (ArithmeticError, ValueError) as error:
            _log.warning("%s cannot place %s: %s", self.point.name, batch, error)
            return None


def _parsed(point: Point, text: str) -> Batch:
    try:
        batch = Batch.parse(text)
    except BatchError as error:
        raise StoreCorrupt(f"the table has a row for an impossible batch: {error}") from error
    if batch.mode not in point.modes:
        raise StoreCorrupt(f"the table has a row of {point.name} for {text}, another kind of pass")
    return batch


def _failures_of(point: Point, setting: Setting, own: list[tuple[Batch, Measurement]]) -> _Failures:
    wrong = None
    attempts: dict[int, list[_Attempt]] = {}
    for batch, row in sorted(own, key=lambda pair: pair[1].batch):
        if row.status is Status.WRONG and wrong is None:
            wrong = f"wrong output on {row.batch}: {row.reason}"
        features = features_of(point, batch, setting)
        failure = None if row.status is Status.OK else row.reason or str(row.status)
        attempts.setdefault(features.sheet, []).append(_Attempt(features.where, row.batch, failure))
    return _Failures(wrong, attempts)
