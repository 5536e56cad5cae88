"""Fitting: from a point's measurements to what its decisions need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import log
from operator import attrgetter, truediv
from typing import NamedTuple

from nsa_tune._errors import BatchError, StoreCorrupt
from nsa_tune.backend.costmodel.model import Failures, LatencyModel, boxes, fit
from nsa_tune.backend.costmodel.residuals import Residuals
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Arm, FeatureFunctions, Point, Setting
from nsa_tune.backend.types.records import Measurement, Status


class Extent(NamedTuple):
    """What was measured, in tokens."""

    shortest: int
    """Mean context of a sequence."""
    longest: int
    most_kv: int
    """Kv tokens of a whole batch."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Everything that decisions need of a point's measurements."""

    models: Mapping[str, Mapping[int, LatencyModel]]
    """By arm and regime."""
    failures: Mapping[str, Failures]
    """By arm."""
    extent: Extent | None
    residuals: Mapping[int, Residuals]
    """By regime; none for a point whose models are not corrected."""


class _Successes(NamedTuple):
    """What an arm took on the batches of a regime, in columns."""

    batches: list[str]
    features: list[tuple[float, ...]]
    times_us: list[float]


class _Sample(NamedTuple):
    """What decisions know of a measured batch."""

    batch: Batch
    regime: int
    features: tuple[float, ...]


def own_rows(point: Point, layers: int, measurements: Iterable[Measurement]) -> list[Measurement]:
    """The point's rows of arms that it knows, the last of each, sorted by arm and batch.

    Each has a layer's share of the cost of a pass, of `layers` that share it, in its times.
    """
    by_arm: dict[str, dict[str, Measurement]] = {arm.name: {} for arm in point.arms}
    name = point.name
    for row in measurements:
        if row.point == name and row.arm in by_arm:
            by_arm[row.arm][row.batch] = row.amortised(layers)
    return [by_arm[arm][batch] for arm in sorted(by_arm) for batch in sorted(by_arm[arm])]


def fitted(
    point: Point, setting: Setting, features: FeatureFunctions, rows: Sequence[Measurement]
) -> Fitted:
    """What decisions of a point need of `rows`, its own ones.

    Raises:
        StoreCorrupt: when a row's batch cannot be read.
    """
    samples = {text: _sample(point, features, text) for text in sorted({row.batch for row in rows})}
    gaps = _gaps(rows)
    successes: dict[str, dict[int, _Successes]] = {}
    models: dict[str, dict[int, LatencyModel]] = {}
    failures: dict[str, Failures] = {}
    for arm, some in groupby(rows, attrgetter("arm")):
        measured = list(some)
        successes[arm] = _successes(measured, samples, point.arm(arm), setting)
        models[arm] = _models(successes[arm], gaps[arm], features.columns(point.arm(arm)))
        if any(row.status is not Status.OK for row in measured):
            failures[arm] = _failures(point, ((samples[row.batch], row) for row in measured))
    succeeded = {row.batch for row in rows if row.status is Status.OK}
    contexts = [samples[text].batch for text in succeeded]
    means = [round(batch.kv_tokens / batch.batch_size) for batch in contexts]
    extent = (
        Extent(min(means), max(means), max(batch.kv_tokens for batch in contexts))
        if contexts
        else None
    )
    return Fitted(
        models, failures, extent, _residuals(models, successes) if point.corrected else {}
    )


def behind_a_cliff(arm: Arm, batch: Batch, setting: Setting) -> bool:
    """Whether the arm takes more on `batch` than the batches before a cliff tell."""
    return arm.surcharge is not None and arm.surcharge_us(batch, setting) > 0


def _sample(point: Point, features: FeatureFunctions, text: str) -> _Sample:
    try:
        batch = Batch.parse(text)
    except BatchError as error:
        raise StoreCorrupt(f"the table has a row for an impossible batch: {error}") from error
    if batch.mode not in point.modes:
        raise StoreCorrupt(f"the table has a row of {point.name} for {text}, another kind of pass")
    # Only the sums are kept: a word of a few characters may stand for thousands of lengths.
    return _Sample(batch.sums, features.regime(batch), features.features(batch))


def _gaps(rows: Iterable[Measurement]) -> dict[str, dict[str, float]]:
    """By arm and batch: how far, as a logarithm, the nearest other arm's time is; 0 without one."""
    logs: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in rows:
        if row.status is Status.OK and row.latency_us is not None:
            logs[row.batch].append((log(row.latency_us), row.arm))
    gaps: dict[str, dict[str, float]] = defaultdict(dict)
    for batch, times in logs.items():
        # Sorted, the nearest is the one before or the one behind.
        times.sort()
        steps = [behind - before for (before, _), (behind, _) in pairwise(times)] or [0.0]
        nearest = [steps[0], *map(min, pairwise(steps)), steps[-1]]
        for (_, arm), gap in zip(times, nearest, strict=False):
            gaps[arm][batch] = gap
    return gaps


def _successes(
    own: Iterable[Measurement], samples: Mapping[str, _Sample], arm: Arm, setting: Setting
) -> dict[int, _Successes]:
    """By regime. What lies behind a cliff would bend the model before it."""
    by_regime: dict[int, _Successes] = defaultdict(lambda: _Successes([], [], []))
    for row in own:
        text, time_us = row.batch, row.latency_us
        if row.status is not Status.OK or time_us is None:
            continue
        batch, regime, features = samples[text]
        if not behind_a_cliff(arm, batch, setting):
            batches, every, times_us = by_regime[regime]
            batches.append(text)
            every.append(features)
            times_us.append(time_us)
    return by_regime


def _models(
    successes: Mapping[int, _Successes], gaps: Mapping[str, float], columns: Sequence[int]
) -> dict[int, LatencyModel]:
    fitted = {
        regime: fit(features, times_us, list(map(gaps.__getitem__, batches)), columns)
        for regime, (batches, features, times_us) in sorted(successes.items())
    }
    return {regime: model for regime, model in fitted.items() if model is not None}


def _residuals(
    models: Mapping[str, Mapping[int, LatencyModel]],
    successes: Mapping[str, Mapping[int, _Successes]],
) -> dict[int, Residuals]:
    places: dict[int, dict[str, tuple[float, ...]]] = defaultdict(dict)
    missed: dict[int, dict[str, dict[str, float]]] = defaultdict(dict)
    for arm, regimes in models.items():
        for regime, model in regimes.items():
            batches, every, times_us = successes[arm][regime]
            places[regime].update(zip(batches, every, strict=True))
            modelled = map(model.latency_us, every)
            missed[regime][arm] = dict(
                zip(batches, map(log, map(truediv, times_us, modelled)), strict=True)
            )
    return {regime: Residuals(places[regime], by_arm) for regime, by_arm in missed.items()}


def _failures(point: Point, own: Iterable[tuple[_Sample, Measurement]]) -> Failures:
    wrong: list[Measurement] = []
    failed: dict[int, list[tuple[Batch, str]]] = defaultdict(list)
    passed: dict[int, list[Batch]] = defaultdict(list)
    for sample, row in own:
        if row.status is Status.WRONG:
            wrong.append(row)
        if row.status is Status.OK:
            passed[point.regime_group(sample.regime)].append(sample.batch)
        else:
            reason = f"failed on {row.batch}: {row.reason or row.status}"
            failed[point.regime_group(sample.regime)].append((sample.batch, reason))
    return Failures(
        f"wrong output on {wrong[0].batch}: {wrong[0].reason}" if wrong else None,
        {group: boxes(some, passed[group]) for group, some in failed.items()},
    )
