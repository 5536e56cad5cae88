"""Report: everything that is shown of a list of tables, as plain records.

Every output (terminal, markdown, CSV, JSON, HTML) is made from these and computes nothing itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nsa_tune._errors import StoreCorrupt
from nsa_tune.backend.batch import Batch
from nsa_tune.backend.layouts import KVLayout
from nsa_tune.backend.point import Answer, Point, Setting
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.policy import Policy, Survey
from nsa_tune.backend.profiles import profile_of
from nsa_tune.backend.records import Key, Measurement, Status, Table
from nsa_tune.backend.rules import SGLANG_0_5_23, Rule
from nsa_tune.backend.surface import Estimate
from nsa_tune.reports.cells import Cell, cells_of
from nsa_tune.reports.crossovers import Line, trace
from nsa_tune.reports.default_cost import Cost, cost_of_choice, cost_of_default
from nsa_tune.reports.slices import slices_of

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


@dataclass(frozen=True, slots=True)
class Section:
    """One table."""

    table: Table
    points: tuple[PointReport, ...]
    failures: tuple[Failure, ...]

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


class _Remembering(Policy):
    """A policy that keeps what it worked out: a report asks about one batch for every question."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._surveys: dict[Batch, Survey] = {}
        self._estimates: dict[Batch, dict[str, Estimate]] = {}

    def survey(self, batch: Batch) -> Survey:
        if batch not in self._surveys:
            self._surveys[batch] = super().survey(batch)
        return self._surveys[batch]

    def estimates(self, batch: Batch) -> dict[str, Estimate]:
        if batch not in self._estimates:
            self._estimates[batch] = super().estimates(batch)
        return self._estimates[batch]


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
    return Report(tuple(_section(table, points, rule) for table in tables), rule.name)


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


def _section(table: Table, points: Mapping[str, Point], rule: Rule) -> Section:
    setting = setting_of(table)
    by_point: dict[str, list[Measurement]] = defaultdict(list)
    for row in table.measurements:
        by_point[row.point].append(row)
    reports = tuple(
        _point_report(point, setting, by_point[name], rule)
        for name, point in points.items()
        if name in by_point
    )
    return Section(table, reports, tuple(_failures(table.measurements)))


def _point_report(
    point: Point, setting: Setting, rows: Sequence[Measurement], rule: Rule
) -> PointReport:
    policy = _Remembering.compile(point, setting, rows)
    answers = tuple(_answer_report(answer, policy, rows, rule) for answer in point.answers)
    return PointReport(point, policy, tuple(rows), answers)


def _answer_report(
    answer: Answer, policy: Policy, rows: Sequence[Measurement], rule: Rule
) -> AnswerReport:
    cells = cells_of(answer, policy, rows, rule)
    measured = tuple(c for c in answer.choices if any(c in cell.times for cell in cells))
    lines: tuple[Line, ...] = ()
    if len(measured) > 1:
        lines = tuple(
            trace(answer, policy, policy.setting, line) for line in slices_of(policy.measured)
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
