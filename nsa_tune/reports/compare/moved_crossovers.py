"""Moved crossovers and changed winners between two reports.

The interval of a single crossover is wide. If many crossovers of the same two choices move in the
same direction, that is more certain, so their mean shift is given too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from nsa_tune.backend.types.batch import Mode

if TYPE_CHECKING:
    from nsa_tune.reports.analysis.cells import Cell
    from nsa_tune.reports.analysis.crossovers import Edge, Line
    from nsa_tune.reports.analysis.report import QuestionReport, Section

_APART = 0.1
"""Crossovers that moved by a smaller relative distance do not count as moved."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A line whose crossovers moved, or changed their choices."""

    question: str
    where: str
    """The line's fixed lengths."""
    before: str
    after: str
    """The fastest choices along the line, on each side."""
    by: float | None
    """The crossover's value after over that before; None where the choices changed."""


@dataclass(frozen=True, slots=True)
class Shift:
    """All crossovers from one choice to another that both sides have, together."""

    question: str
    left: str
    right: str
    count: int
    mean: float
    """Geometric mean of their value after over that before."""
    low: float
    high: float
    """95 % interval of the mean, from the spread; infinite with fewer than three crossovers."""


@dataclass(frozen=True, slots=True)
class Winner:
    """A batch on which the sides are sure of different choices."""

    question: str
    batch: str
    before: str
    after: str


def other_winners(ours: Section, theirs: Section) -> list[Winner]:
    """The measured batches on which both sides are sure of their winners, and these differ."""
    return [
        Winner(question, before.word, before.choice or "", after.choice or "")
        for question, one, other in _questions(ours, theirs)
        for before, after in _cells(one, other)
        if _differ(before, after)
    ]


def moved_crossovers(ours: Section, theirs: Section) -> list[Moved]:
    """The lines whose crossovers surely moved.

    That is: by more than 10 %, with each side's value outside the other's interval; or past a
    measured batch on which both sides are sure of different winners.
    """
    return list(_moved(ours, theirs))


def shifts(ours: Section, theirs: Section) -> list[Shift]:
    """The mean shift of the crossovers between each two choices, without those at limits."""
    steps: dict[tuple[str, str, str], list[float]] = {}
    for question, line, match in _lines(ours, theirs):
        if _kinds(line) == _kinds(match):
            for before, after in zip(line.edges, match.edges, strict=True):
                if not before.limit and not after.limit:
                    kind = (question, before.left, before.right)
                    steps.setdefault(kind, []).append(log(after.value / before.value))
    return [_shift(kind, some) for kind, some in steps.items()]


def _shift(kind: tuple[str, str, str], steps: Sequence[float]) -> Shift:
    mean = fmean(steps)
    half = 2 * stdev(steps) / len(steps) ** 0.5 if len(steps) > 2 else inf
    return Shift(*kind, len(steps), exp(mean), exp(mean - half), exp(mean + half))


def _moved(ours: Section, theirs: Section) -> Iterator[Moved]:
    differing = {(one.question, one.batch) for one in other_winners(ours, theirs)}
    for question, line, match in _lines(ours, theirs):
        mode = f"{line.slice.mode}, " if line.slice.mode != Mode.EXTEND else ""
        found = Moved(question, f"{mode}{line.slice.label}", line.summary, match.summary, None)
        if _kinds(line) == _kinds(match):
            steps = [step for step in map(_step, line.edges, match.edges) if step is not None]
            if steps:
                yield replace(found, by=max(steps, key=lambda step: abs(log(step))))
        elif any((question, str(line.slice.batch(value))) in differing
                 for value in line.slice.values):  # fmt: skip
            yield found


def _lines(ours: Section, theirs: Section) -> Iterator[tuple[str, Line, Line]]:
    """(question, line, the same line on the other side)."""
    for question, one, other in _questions(ours, theirs):
        matches = {_place(line): line for line in other.lines}
        for line in one.lines:
            if _place(line) in matches:
                yield question, line, matches[_place(line)]


def _kinds(line: Line) -> list[tuple[str, str]]:
    return [(edge.left, edge.right) for edge in line.edges]


def _questions(
    ours: Section, theirs: Section
) -> Iterator[tuple[str, QuestionReport, QuestionReport]]:
    others = {question.name: question for question in theirs.questions}
    for question in ours.questions:
        if question.name in others:
            yield question.name, question, others[question.name]


def _cells(one: QuestionReport, other: QuestionReport) -> Iterator[tuple[Cell, Cell]]:
    after: Mapping[str, Cell] = {cell.word: cell for cell in other.cells}
    for cell in one.cells:
        if cell.word in after:
            yield cell, after[cell.word]


def _differ(before: Cell, after: Cell) -> bool:
    sure = {before.verdict, after.verdict} <= {"win", "only"}
    return sure and before.choice != after.choice


def _place(line: Line) -> tuple[object, ...]:
    return (line.slice.mode, line.slice.axis, line.slice.fixed)


def _step(before: Edge, after: Edge) -> float | None:
    """The factor by which a crossover moved; None if it may not have moved."""
    step = after.value / before.value
    if before.limit and after.limit:
        return step if step != 1 else None
    apart = not before.low <= after.value <= before.high
    apart = apart and not after.low <= before.value <= after.high
    return step if apart and abs(log(step)) > log(1 + _APART) else None
