"""Compiling a point's measurements into what its decisions need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log
from typing import TYPE_CHECKING, NamedTuple

from nsa_tune._errors import BatchError, StoreCorrupt
from nsa_tune.backend.batch import Batch
from nsa_tune.backend.costs import CostModel, Failures, boxes, fit
from nsa_tune.backend.records import Measurement, Status

if TYPE_CHECKING:
    from nsa_tune.backend.point import Arm, Point, Setting

__all__ = ["Compiled", "Extent", "behind_a_cliff", "compiled", "own_rows"]

_MOST_REGRET = 0.01
"""Mean regret of the cost models on measured batches above which the surfaces decide instead."""


_JUDGED = 256
"""Batches of a sheet on which the models are judged, at most."""


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


class _Success(NamedTuple):
    """What an arm took on a batch."""

    batch: str
    terms: tuple[float, ...]
    latency_us: float


class _Sample(NamedTuple):
    """What decisions know of a measured batch."""

    batch: Batch
    sheet: int
    terms: tuple[float, ...]


def own_rows(point: Point, measurements: Iterable[Measurement]) -> list[Measurement]:
    """The point's rows of arms that it knows, the last of each, sorted by arm and batch."""
    known = {arm.name for arm in point.arms}
    rows = {
        (row.arm, row.batch): row
        for row in measurements
        if row.point == point.name and row.arm in known
    }
    return [rows[key] for key in sorted(rows)]


def compiled(point: Point, setting: Setting, rows: Sequence[Measurement]) -> Compiled:
    """What decisions of `point` need of `rows`, its own ones.

    Raises:
        StoreCorrupt: when a row's batch cannot be read.
    """
    samples = {text: _sample(point, setting, text) for text in sorted({row.batch for row in rows})}
    by_arm: dict[str, list[tuple[_Sample, Measurement]]] = defaultdict(list)
    for row in rows:
        by_arm[row.arm].append((samples[row.batch], row))
    gaps = _gaps(rows)
    successes: dict[str, dict[int, list[_Success]]] = {}
    models: dict[str, dict[int, CostModel]] = {}
    failures: dict[str, Failures] = {}
    for arm, own in by_arm.items():
        # What lies behind a cliff would bend the model before it.
        successes[arm] = _successes(
            (sample, row)
            for sample, row in own
            if not behind_a_cliff(point.arm(arm), sample.batch, setting)
        )
        models[arm] = _models(successes[arm], gaps[arm])
        if any(row.status is not Status.OK for _, row in own):
            failures[arm] = _failures(own)
    succeeded = {row.batch for row in rows if row.status is Status.OK}
    contexts = [samples[text].batch for text in succeeded]
    means = [round(batch.kv_tokens / batch.sequences) for batch in contexts]
    extent = (
        Extent(min(means), max(means), max(batch.kv_tokens for batch in contexts))
        if contexts
        else None
    )
    return Compiled(models, failures, _badly_chosen(point, models, successes), extent)


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
    return _Sample(batch, point.sheet(batch), point.cost_terms(batch, setting))


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
        steps = [behind - before for (before, _), (behind, _) in pairwise(times)]
        for (_, arm), before, behind in zip(times, [inf, *steps], [*steps, inf], strict=True):
            gaps[arm][batch] = min(before, behind) if steps else 0.0
    return gaps


def _successes(own: Iterable[tuple[_Sample, Measurement]]) -> dict[int, list[_Success]]:
    """By sheet."""
    found: dict[int, list[_Success]] = defaultdict(list)
    for sample, row in own:
        if row.status is Status.OK and row.latency_us is not None:
            found[sample.sheet].append(_Success(row.batch, sample.terms, row.latency_us))
    return found


def _models(
    successes: Mapping[int, Sequence[_Success]], gaps: Mapping[str, float]
) -> dict[int, CostModel]:
    fitted = {
        sheet: fit(
            [one.terms for one in some],
            [one.latency_us for one in some],
            [gaps[one.batch] for one in some],
        )
        for sheet, some in sorted(successes.items())
    }
    return {sheet: model for sheet, model in fitted.items() if model is not None}


def _failures(own: Sequence[tuple[_Sample, Measurement]]) -> Failures:
    wrong = [row for _, row in own if row.status is Status.WRONG]
    failed: dict[int, list[tuple[Batch, str]]] = defaultdict(list)
    passed: dict[int, list[Batch]] = defaultdict(list)
    for sample, row in own:
        if row.status is Status.OK:
            passed[sample.sheet].append(sample.batch)
        else:
            reason = f"failed on {row.batch}: {row.reason or row.status}"
            failed[sample.sheet].append((sample.batch, reason))
    return Failures(
        f"wrong output on {wrong[0].batch}: {wrong[0].reason}" if wrong else None,
        {sheet: boxes(some, passed[sheet]) for sheet, some in failed.items()},
    )


def _badly_chosen(
    point: Point,
    models: Mapping[str, Mapping[int, CostModel]],
    successes: Mapping[str, Mapping[int, Sequence[_Success]]],
) -> frozenset[int]:
    """`Compiled.by_surfaces`, by how well the models choose among what was measured."""
    measured = {arm for arm, sheets in models.items() if sheets}
    questions = [
        [arms for arms in answer.choices.values() if not measured.isdisjoint(arms)]
        for answer in point.answers
    ]
    found = set()
    for sheet in {sheet for some in successes.values() for sheet in some}:
        times = _judged(sheet, models, successes)
        for choices in questions if len(times) else ():
            losses = [loss for one in times.values() if (loss := _loss(choices, one)) is not None]
            if losses and sum(losses) / len(losses) > _MOST_REGRET:
                found.add(sheet)
    return frozenset(found)


_Times = Mapping[str, tuple[float, float]]
"""By arm: as measured, and by its model."""


def _judged(
    sheet: int,
    models: Mapping[str, Mapping[int, CostModel]],
    successes: Mapping[str, Mapping[int, Sequence[_Success]]],
) -> dict[str, _Times]:
    """The times on enough batches of a sheet, spread over all."""
    texts = sorted({one.batch for some in successes.values() for one in some.get(sheet, ())})
    times: dict[str, dict[str, tuple[float, float]]] = {
        text: {} for text in texts[:: len(texts) // _JUDGED + 1]
    }
    for arm, sheets in successes.items():
        model = models[arm].get(sheet)
        for one in sheets.get(sheet, ()) if model is not None else ():
            if one.batch in times:
                assert model is not None
                times[one.batch][arm] = (one.latency_us, model.latency_us(one.terms))
    return {**times}


def _loss(choices: Sequence[Sequence[str]], times: _Times) -> float | None:
    """What is lost by taking the choice that is best by the models; None without another."""
    best, fastest, least, known = 0.0, inf, inf, 0
    for arms in choices:
        some = [times[arm] for arm in arms if arm in times]
        if some:
            known += 1
            time, cost = some[0] if len(some) == 1 else map(min, zip(*some, strict=True))
            fastest = min(fastest, time)
            if cost < least:
                best, least = time, cost
    return best / fastest - 1 if known > 1 else None
