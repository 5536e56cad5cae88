"""Compiling a point's measurements into what its decisions need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import log
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from nsa_tune._errors import BatchError, StoreCorrupt
from nsa_tune.backend.costmodel.judging import Successes, judged
from nsa_tune.backend.costmodel.model import CostModel, Failures, boxes, fit
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.records import Measurement, Status

if TYPE_CHECKING:
    from nsa_tune.backend.types.point import Arm, Point, Setting

__all__ = ["Compiled", "Extent", "behind_a_cliff", "compiled", "own_rows"]


class Extent(NamedTuple):
    """What was measured, in tokens."""

    shortest: int
    """Mean context of a sequence."""
    longest: int
    most_kv: int
    """Kv tokens of a whole batch."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Everything that decisions need of a point's measurements."""

    models: Mapping[str, Mapping[int, CostModel]]
    """By arm and sheet."""
    failures: Mapping[str, Failures]
    """By arm."""
    by_surfaces: frozenset[int]
    """The sheets on which the cost models choose badly, so that the surfaces decide."""
    extent: Extent | None


class _Sample(NamedTuple):
    """What decisions know of a measured batch."""

    batch: Batch
    sheet: int
    terms: tuple[float, ...]


def own_rows(point: Point, measurements: Iterable[Measurement]) -> list[Measurement]:
    """The point's rows of arms that it knows, the last of each, sorted by arm and batch."""
    by_arm: dict[str, dict[str, Measurement]] = {arm.name: {} for arm in point.arms}
    name = point.name
    for row in measurements:
        if row.point == name and row.arm in by_arm:
            by_arm[row.arm][row.batch] = row
    return [by_arm[arm][batch] for arm in sorted(by_arm) for batch in sorted(by_arm[arm])]


def compiled(point: Point, setting: Setting, rows: Sequence[Measurement]) -> Compiled:
    """What decisions of `point` need of `rows`, its own ones.

    Raises:
        StoreCorrupt: when a row's batch cannot be read.
    """
    samples = {text: _sample(point, setting, text) for text in sorted({row.batch for row in rows})}
    gaps = _gaps(rows)
    successes: dict[str, dict[int, Successes]] = {}
    models: dict[str, dict[int, CostModel]] = {}
    failures: dict[str, Failures] = {}
    for arm, some in groupby(rows, attrgetter("arm")):
        own = list(some)
        successes[arm] = _successes(own, samples, point.arm(arm), setting)
        models[arm] = _models(successes[arm], gaps[arm], point.columns_of(arm))
        if any(row.status is not Status.OK for row in own):
            failures[arm] = _failures(point, ((samples[row.batch], row) for row in own))
    succeeded = {row.batch for row in rows if row.status is Status.OK}
    contexts = [samples[text].batch for text in succeeded]
    means = [round(batch.kv_tokens / batch.sequences) for batch in contexts]
    extent = (
        Extent(min(means), max(means), max(batch.kv_tokens for batch in contexts))
        if contexts
        else None
    )
    models, by_surfaces = judged(point.answers, models, successes)
    return Compiled(models, failures, by_surfaces, extent)


def behind_a_cliff(arm: Arm, batch: Batch, setting: Setting) -> bool:
    """Whether the arm takes more on `batch` than the batches before a cliff tell."""
    return arm.surcharge_us is not None and arm.surcharge_us(batch, setting) > 0


def _sample(point: Point, setting: Setting, text: str) -> _Sample:
    try:
        batch = Batch.parse(text)
    except BatchError as error:
        raise StoreCorrupt(f"the table has a row for an impossible batch: {error}") from error
    if batch.mode not in point.modes:
        raise StoreCorrupt(f"the table has a row of {point.name} for {text}, another kind of pass")
    return _Sample(batch, point.sheet(batch, setting), point.cost_terms(batch, setting))


def _gaps(rows: Iterable[Measurement]) -> dict[str, dict[str, float]]:
    """By arm and batch: how far, as a logarithm, the nearest other arm's time is; 0 without one."""
    logs: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in rows:
        if row.status is Status.OK and row.latency_us is not None:
            logs[row.batch].append((log(row.latency_us), row.arm))
    gaps: dict[str, dict[str, float]] = defaultdict(dict)
    for batch, times in logs.items():
        if len(times) == 2:
            (one, first), (other, second) = times
            gaps[first][batch] = gaps[second][batch] = abs(one - other)
            continue
        # Sorted, the nearest is the one before or the one behind.
        times.sort()
        steps = [behind - before for (before, _), (behind, _) in pairwise(times)] or [0.0]
        nearest = [steps[0], *map(min, pairwise(steps)), steps[-1]]
        for (_, arm), gap in zip(times, nearest, strict=False):
            gaps[arm][batch] = gap
    return gaps


def _successes(
    own: Iterable[Measurement], samples: Mapping[str, _Sample], arm: Arm, setting: Setting
) -> dict[int, Successes]:
    """By sheet. What lies behind a cliff would bend the model before it."""
    found: dict[int, Successes] = defaultdict(lambda: Successes([], [], []))
    for row in own:
        text, time_us = row.batch, row.latency_us
        if row.status is not Status.OK or time_us is None:
            continue
        batch, sheet, terms = samples[text]
        if arm.surcharge_us is None or not behind_a_cliff(arm, batch, setting):
            batches, every, times_us = found[sheet]
            batches.append(text)
            every.append(terms)
            times_us.append(time_us)
    return found


def _models(
    successes: Mapping[int, Successes], gaps: Mapping[str, float], columns: Sequence[int]
) -> dict[int, CostModel]:
    fitted = {
        sheet: fit(terms, times_us, list(map(gaps.__getitem__, batches)), columns)
        for sheet, (batches, terms, times_us) in sorted(successes.items())
    }
    return {sheet: model for sheet, model in fitted.items() if model is not None}


def _failures(point: Point, own: Iterable[tuple[_Sample, Measurement]]) -> Failures:
    wrong: list[Measurement] = []
    failed: dict[int, list[tuple[Batch, str]]] = defaultdict(list)
    passed: dict[int, list[Batch]] = defaultdict(list)
    for sample, row in own:
        if row.status is Status.WRONG:
            wrong.append(row)
        if row.status is Status.OK:
            passed[point.kin(sample.sheet)].append(sample.batch)
        else:
            reason = f"failed on {row.batch}: {row.reason or row.status}"
            failed[point.kin(sample.sheet)].append((sample.batch, reason))
    return Failures(
        f"wrong output on {wrong[0].batch}: {wrong[0].reason}" if wrong else None,
        {kin: boxes(some, passed[kin]) for kin, some in failed.items()},
    )
