"""Report: everything that is shown of a list of tables, as plain records.

Every output (terminal, markdown, CSV, JSON, HTML) is made from these and computes nothing itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nsa_tune._errors import StoreCorrupt
from nsa_tune.backend.baselines import SGLANG_0_5_23, Rule
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import SharedPlaces
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Answer, Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Key, Measurement, Status, Table
from nsa_tune.reports.content.cells import Cell, cells_of
from nsa_tune.reports.content.chunks import ChunkCurve, chunk_curves
from nsa_tune.reports.content.crossovers import Line, trace
from nsa_tune.reports.content.default_cost import Cost, cost_of_choice, cost_of_default
from nsa_tune.reports.content.remembering import Remembering
from nsa_tune.reports.content.roofline import POINT as ROOFLINE
from nsa_tune.reports.content.roofline import Achieved, Ceilings, achieved_of, ceilings_of
from nsa_tune.reports.content.slices import Slice, slices_of

__all__ = ["AnswerReport", "Failure", "PointReport", "Report", "Section", "build"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Batches on which one arm failed or was wrong for one reason."""

    point: str
    arm: str
    status: str
    reason: str
    batches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """One question of a point."""

    answer: Answer
    measured: tuple[str, ...]
    """The choices that some arm was measured for, in declared order."""
    lines: tuple[Line, ...]
    """Empty when fewer than two choices were measured: there is nothing to cross."""
    cells: tuple[Cell, ...]
    default_cost: Cost | None
    tuned_cost: Cost | None


@dataclass(frozen=True, slots=True)
class PointReport:
    """One decision point."""

    point: Point
    policy: Policy
    measurements: tuple[Measurement, ...]
    answers: tuple[AnswerReport, ...]
    chunks: tuple[ChunkCurve, ...]
    """A long prompt over chunk sizes; empty for a point that does not prefill."""
    achieved: tuple[Achieved, ...]
    """What every measurement came to, where the work of its arm is known."""


@dataclass(frozen=True, slots=True)
class Section:
    """One table."""

    table: Table
    points: tuple[PointReport, ...]
    failures: tuple[Failure, ...]
    ceilings: Ceilings | None
    """None when the table has no measurement of a copy and of a matrix product."""

    @property
    def key(self) -> Key:
        """What the table is valid for."""
        return self.table.key

    @property
    def answers(self) -> tuple[AnswerReport, ...]:
        """The questions of all points."""
        return tuple(answer for point in self.points for answer in point.answers)


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to show."""

    sections: tuple[Section, ...]
    rule: str
    """The engine rule that costs are given for."""


def build(
    tables: Iterable[Table],
    *,
    points: Mapping[str, Point] = POINTS,
    rule: Rule = SGLANG_0_5_23,
) -> Report:
    """The report over `tables`, in their order.

    Raises:
        StoreCorrupt: when a table names a KV layout or a batch that does not exist.
        UnknownName: when a table is of a model that this version does not know.
    """
    places: SharedPlaces = {}
    return Report(tuple(_section(table, points, rule, places) for table in tables), rule.name)


def setting_of(table: Table) -> Setting:
    """The setting that `table` was measured in."""
    key = table.key
    try:
        layout = KVLayout(key.kv_layout)
    except ValueError:
        raise StoreCorrupt(f"{table.source} has an unknown KV layout {key.kv_layout!r}") from None
    return Setting(
        profile_of(key.model), key.heads, layout, table.device, dict(key.libraries),
        limits=dict(table.limits),
    )  # fmt: skip


def _section(
    table: Table, points: Mapping[str, Point], rule: Rule, places: SharedPlaces
) -> Section:
    setting = setting_of(table)
    by_point: dict[str, list[Measurement]] = defaultdict(list)
    for row in table.measurements:
        by_point[row.point].append(row)
    ceilings = ceilings_of(by_point[ROOFLINE])
    reports = tuple(
        _point_report(Remembering.of(point, setting, by_point[name], rule, places), ceilings)
        for name, point in points.items()
        if name in by_point
    )
    return Section(table, reports, tuple(_failures(table.measurements)), ceilings)


def _point_report(policy: Remembering, ceilings: Ceilings | None) -> PointReport:
    ordered = sorted(policy.measured, key=lambda batch: (batch.mode, batch.lens or ()))
    batches = {str(batch): batch for batch in ordered}
    measured: dict[str, dict[str, Measurement]] = {word: {} for word in batches}
    for row in policy.measurements:
        if row.status is Status.OK and row.batch in measured:
            measured[row.batch][row.arm] = row
    slices = slices_of(ordered)
    answers = tuple(
        _answer_report(answer, policy, cells_of(answer, policy, batches, measured), slices)
        for answer in policy.point.answers
    )
    return PointReport(
        point=policy.point,
        policy=policy,
        measurements=policy.measurements,
        answers=answers,
        chunks=chunk_curves(policy, policy.rule),
        achieved=achieved_of(policy, batches, policy.measurements, ceilings),
    )


def _answer_report(
    answer: Answer, policy: Remembering, cells: list[Cell], slices: Sequence[Slice]
) -> AnswerReport:
    measured = tuple(c for c in answer.choices if any(c in cell.times for cell in cells))
    lines: tuple[Line, ...] = ()
    if len(measured) > 1:
        traced = (trace(answer, policy, line) for line in slices)
        # Where a limit forbids every choice there is no question.
        lines = tuple(
            line for line in traced if any(one.verdict != Verdict.NONE for one in line.ranges)
        )
    # A batch with one choice left has nothing to win or to lose.
    open_cells = [cell for cell in cells if len(cell.times) > 1]
    return AnswerReport(
        answer, measured, lines, tuple(cells), cost_of_default(open_cells),
        cost_of_choice(open_cells),
    )  # fmt: skip


def _failures(rows: Iterable[Measurement]) -> list[Failure]:
    groups: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.status is not Status.OK:
            groups[(row.point, row.arm, str(row.status), row.reason)].append(row.batch)
    return [Failure(*what, tuple(batches)) for what, batches in sorted(groups.items())]
