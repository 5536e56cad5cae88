"""Compiling a point's measurements into what its decisions need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, NamedTuple

from nsa_tune._errors import BatchError, StoreCorrupt
from nsa_tune.backend.batch import Batch
from nsa_tune.backend.costs import CostModel, Failures, boxes, fit
from nsa_tune.backend.records import Measurement, Status

if TYPE_CHECKING:
    from nsa_tune.backend.point import Answer, Arm, Point, Setting

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
    before: dict[str, list[tuple[_Sample, Measurement]]] = {}
    models: dict[str, dict[int, CostModel]] = {}
    failures: dict[str, Failures] = {}
    for arm, own in by_arm.items():
        # What lies behind a cliff would bend the model before it.
        before[arm] = [
            (sample, row)
            for sample, row in own
            if not behind_a_cliff(point.arm(arm), sample.batch, setting)
        ]
        models[arm] = _models(before[arm], gaps[arm])
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
    return Compiled(models, failures, _badly_chosen(point, models, before), extent)


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
    logs: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for row in rows:
        if row.status is Status.OK and row.latency_us is not None:
            logs[row.batch].append((row.arm, log(row.latency_us)))
    gaps: dict[str, dict[str, float]] = defaultdict(dict)
    for batch, times in logs.items():
        for arm, time in times:
            others = [abs(time - other) for name, other in times if name != arm]
            gaps[arm][batch] = min(others, default=0.0)
    return gaps


def _models(
    own: Iterable[tuple[_Sample, Measurement]], gaps: Mapping[str, float]
) -> dict[int, CostModel]:
    terms: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    times: dict[int, list[float]] = defaultdict(list)
    near: dict[int, list[float]] = defaultdict(list)
    for sample, row in own:
        if row.status is Status.OK and row.latency_us is not None:
            terms[sample.sheet].append(sample.terms)
            times[sample.sheet].append(row.latency_us)
            near[sample.sheet].append(gaps[row.batch])
    fitted = {sheet: fit(terms[sheet], times[sheet], near[sheet]) for sheet in sorted(terms)}
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
    by_arm: Mapping[str, Sequence[tuple[_Sample, Measurement]]],
) -> frozenset[int]:
    """`Compiled.by_surfaces`, by how well the models choose among what was measured."""
    sheets: dict[str, int] = {}
    for own in by_arm.values():
        sheets |= {row.batch: sample.sheet for sample, row in own if row.status is Status.OK}
    judged = _spread(sheets)
    times: dict[str, dict[str, float]] = {text: {} for text in judged}
    costs: dict[str, dict[str, float]] = {text: {} for text in judged}
    for arm, own in by_arm.items():
        for sample, row in own:
            model = models[arm].get(sample.sheet)
            if row.batch in times and row.latency_us is not None and model is not None:
                times[row.batch][arm] = row.latency_us
                costs[row.batch][arm] = model.latency_us(sample.terms)
    answers = [
        answer
        for answer in point.answers
        if sum(not models.keys().isdisjoint(arms) for arms in answer.choices.values()) > 1
    ]
    losses: dict[tuple[int, str], list[float]] = defaultdict(list)
    for text in judged:
        sheet = sheets[text]
        for answer in answers:
            measured = _choice_costs(answer, times[text])
            if len(measured) > 1:
                modelled = _choice_costs(answer, costs[text])
                taken = min(modelled, key=modelled.__getitem__)
                losses[sheet, answer.name].append(measured[taken] / min(measured.values()) - 1)
    return frozenset(
        sheet for (sheet, _), some in losses.items() if sum(some) / len(some) > _MOST_REGRET
    )


def _spread(sheets: Mapping[str, int]) -> list[str]:
    """Enough batches of each sheet, spread over all."""
    by_sheet: dict[int, list[str]] = defaultdict(list)
    for text in sorted(sheets):
        by_sheet[sheets[text]].append(text)
    return [text for some in by_sheet.values() for text in some[:: len(some) // _JUDGED + 1]]


def _choice_costs(answer: Answer, arms: Mapping[str, float]) -> dict[str, float]:
    """Each choice of which an arm is among `arms`, with the least of their times."""
    found: dict[str, float] = {}
    for choice, names in answer.choices.items():
        times = [arms[name] for name in names if name in arms]
        if times:
            found[choice] = min(times)
    return found
