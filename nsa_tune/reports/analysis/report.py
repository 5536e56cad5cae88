"""A report over tables, as plain records.

Every output format (terminal, markdown, CSV, JSON, HTML, pictures) only lays these records out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from nsa_tune.backend.baselines import DEFAULT_BASELINE
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import SharedPlaces
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Question, Setting
from nsa_tune.backend.types.records import Key, Measurement, Status, Table
from nsa_tune.reports.analysis.answer import Answer, answer_of
from nsa_tune.reports.analysis.cached_policy import CachedPolicy
from nsa_tune.reports.analysis.ceilings import Ceilings, ceilings_of
from nsa_tune.reports.analysis.cells import Cell, cells_of
from nsa_tune.reports.analysis.costs import Cost, cost_of
from nsa_tune.reports.analysis.crossovers import Line, trace
from nsa_tune.reports.analysis.layer_steps import LayerSteps, layer_steps, typical_batches
from nsa_tune.reports.analysis.slices import Slice, slices_of


@dataclass(frozen=True, slots=True)
class Failure:
    """Batches on which one arm failed or was wrong for one reason."""

    point: str
    arm: str
    status: str
    reason: str
    batches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuestionReport:
    """One question of a point."""

    name: str
    choices: tuple[str, ...]
    measured: tuple[str, ...]
    """The choices that at least one arm was measured for, in declared order."""
    lines: tuple[Line, ...]
    """Empty when fewer than two choices were measured: no crossover is possible."""
    cells: tuple[Cell, ...]
    default_cost: Cost | None
    tuned_cost: Cost | None

    @property
    def line_groups(self) -> list[tuple[Line, ...]]:
        """The lines, grouped by mode and axis: each group fits into one table or one map."""
        groups = groupby(self.lines, key=lambda line: (line.slice.mode, line.slice.axis))
        return [tuple(lines) for _, lines in groups]


@dataclass(frozen=True, slots=True)
class PointReport:
    """One decision point."""

    point: Point
    policy: Policy
    questions: tuple[QuestionReport, ...]
    answer: Answer | None
    """What to set; None for a point without an option and a plug-in of its own."""


@dataclass(frozen=True, slots=True)
class Section:
    """One table."""

    table: Table
    points: tuple[PointReport, ...]
    failures: tuple[Failure, ...]
    layers: tuple[LayerSteps, ...]
    """Where the attention time of typical batches goes; batches without any time are left out."""
    ceilings: Ceilings | None
    """What the device reaches; None unless the table has measurements of both a copy and a matrix
    product."""

    @property
    def key(self) -> Key:
        """What the table is valid for."""
        return self.table.key

    @property
    def title(self) -> str:
        """GPU, model, local heads and KV layout in one line."""
        key = self.key
        return f"{key.gpu}, {key.model}, {key.heads} local heads, {key.kv_layout}"

    @property
    def answers(self) -> tuple[Answer, ...]:
        """What to set, by step of a pass."""
        return tuple(point.answer for point in self.points if point.answer is not None)

    @property
    def is_demonstration(self) -> bool:
        """Whether it was measured on a CPU, of which nothing holds for a GPU."""
        return self.table.device.arch == "cpu"

    @property
    def questions(self) -> tuple[QuestionReport, ...]:
        """The questions of all points."""
        return tuple(question for point in self.points for question in point.questions)


@dataclass(frozen=True, slots=True)
class Report:
    """One section for each table."""

    sections: tuple[Section, ...]
    baseline: str
    """Name of the engine baseline whose cost is shown."""


def build(tables: Iterable[Table], *, points: Mapping[str, Point] = POINTS) -> Report:
    """The report over `tables`, in their order.

    Raises:
        StoreCorrupt: when a table names a KV layout or a batch that does not exist.
        UnknownName: when a table is of a model that this version does not know.
    """
    places: SharedPlaces = {}
    sections = tuple(_section(table, points, places) for table in tables)
    return Report(sections, DEFAULT_BASELINE.name)


def _section(table: Table, points: Mapping[str, Point], places: SharedPlaces) -> Section:
    setting = Setting.of(table)
    ceilings = ceilings_of(table.measurements)
    reports = tuple(map(_point_report, _policies(table, points, places)))
    layers = tuple(_layers(reports, points, setting, ceilings))
    return Section(table, reports, tuple(_failures(table.measurements)), layers, ceilings)


def _policies(
    table: Table, points: Mapping[str, Point], places: SharedPlaces
) -> Iterator[CachedPolicy]:
    """The policy of each point that the table has measurements of."""
    setting = Setting.of(table)
    by_point: dict[str, list[Measurement]] = defaultdict(list)
    for row in table.measurements:
        by_point[row.point].append(row)
    for name, point in points.items():
        if name in by_point:
            yield CachedPolicy.of(point, setting, by_point[name], DEFAULT_BASELINE, places)


def measured_cells(table: Table, points: Mapping[str, Point] = POINTS) -> dict[str, list[Cell]]:
    """The cells of a report by question, without what takes longest to compute: the lines."""
    cells: dict[str, list[Cell]] = {}
    for policy in _policies(table, points, {}):
        batches, measured = _measured(policy)
        for question in policy.point.questions:
            cells[question.name] = cells_of(question, policy, batches, measured)
    return cells


def _measured(
    policy: CachedPolicy,
) -> tuple[dict[str, Batch], dict[str, dict[str, Measurement]]]:
    """The batches by their text, and the successful measurements by that text and the arm."""
    ordered = sorted(policy.measured, key=lambda batch: (batch.mode, batch.lens or ()))
    batches = {str(batch): batch for batch in ordered}
    measured: dict[str, dict[str, Measurement]] = {word: {} for word in batches}
    for row in policy.rows:
        if row.status is Status.OK and row.batch in measured:
            measured[row.batch][row.arm] = row
    return batches, measured


def _layers(
    reports: Iterable[PointReport], points: Mapping[str, Point], setting: Setting,
    ceilings: Ceilings | None,
) -> Iterator[LayerSteps]:  # fmt: skip
    """The steps of typical batches; those of points that the table has nothing of have no time."""
    here = {report.point.name: report.policy for report in reports}
    policies: dict[str, Policy] = {}
    for name, point in points.items():
        if setting.profile.family in point.families:
            policies[name] = here.get(name) or Policy.fit(point, setting, ())
    for batch in typical_batches(here):
        chosen = partial(_taken, batch)
        found = layer_steps(batch, policies, setting, DEFAULT_BASELINE, chosen, ceilings)
        if any(step.latency_us for step in found.steps):
            yield found


def _taken(batch: Batch, policy: Policy, question: Question) -> str | None:
    return policy.decide(question, batch).choice if isinstance(policy, CachedPolicy) else None


def _point_report(policy: CachedPolicy) -> PointReport:
    batches, measured = _measured(policy)
    slices = slices_of(batches.values())
    questions = tuple(
        _question_report(question, policy, cells_of(question, policy, batches, measured), slices)
        for question in policy.point.questions
    )
    return PointReport(policy.point, policy, questions, answer_of(policy, measured))


def _question_report(
    question: Question, policy: CachedPolicy, cells: list[Cell], slices: Sequence[Slice]
) -> QuestionReport:
    measured = tuple(c for c in question.choices if any(c in cell.times for cell in cells))
    lines: tuple[Line, ...] = ()
    if len(measured) > 1:
        traced = (trace(question, policy, line) for line in slices)
        # Leave out lines on which every choice is forbidden.
        lines = tuple(
            line for line in traced if any(one.verdict != Verdict.NONE for one in line.ranges)
        )
    # With one choice left, choosing costs nothing.
    open_cells = [cell for cell in cells if len(cell.times) > 1]
    return QuestionReport(
        name=question.name,
        choices=tuple(question.choices),
        measured=measured,
        lines=lines,
        cells=tuple(cells),
        default_cost=cost_of([(cell, cell.default) for cell in open_cells]),
        tuned_cost=cost_of([(cell, cell.choice) for cell in open_cells]),
    )


def _failures(rows: Iterable[Measurement]) -> list[Failure]:
    groups: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.status is not Status.OK:
            groups[(row.point, row.arm, str(row.status), row.reason)].append(row.batch)
    return [Failure(*what, tuple(batches)) for what, batches in sorted(groups.items())]
