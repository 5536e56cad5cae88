"""Crossovers and winners of two reports: which moved, which are others now.

One crossover's interval is wide, as it is where neither choice wins surely. Many that move the same
way say more than each: so their mean shift is given besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from nsa_tune.backend.types.batch import Mode

if TYPE_CHECKING:
    from nsa_tune.reports.content.cells import Cell
    from nsa_tune.reports.content.crossovers import Edge, Line
    from nsa_tune.reports.content.report import AnswerReport, Section

__all__ = ["Moved", "Shift", "Winner", "moved_crossovers", "other_winners", "shifts"]

_APART = 0.1
"""Relative distance that two crossovers must have to count as moved, besides their intervals."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A line on which the answer changes elsewhere, or otherwise, than it did."""

    answer: str
    where: str
    """The line's fixed lengths."""
    before: str
    after: str
    """What is fastest along it, on each side."""
    by: float | None
    """The crossover's value over what it was; None where the crossovers are others."""


@dataclass(frozen=True, slots=True)
class Shift:
    """All crossovers of one kind that both sides have."""

    answer: str
    left: str
    right: str
    count: int
    mean: float
    """Geometric mean of their value after over that before."""
    low: float
    high: float
    """95 % interval of the mean, as the crossovers spread; open with fewer than three."""


@dataclass(frozen=True, slots=True)
class Winner:
    """A batch on which both sides are sure of different choices."""

    answer: str
    batch: str
    before: str
    after: str


def other_winners(ours: Section, theirs: Section) -> list[Winner]:
    """The measured batches on which the winner is surely another one now."""
    return [
        Winner(answer, before.word, before.choice or "", after.choice or "")
        for answer, one, other in _answers(ours, theirs)
        for before, after in _cells(one, other)
        if _differ(before, after)
    ]


def moved_crossovers(ours: Section, theirs: Section) -> list[Moved]:
    """The lines whose crossovers moved surely: to a value outside of the other side's interval,
    both ways, and by 10 %; or past a measured batch that both sides surely answer differently."""
    return list(_moved(ours, theirs))


def shifts(ours: Section, theirs: Section) -> list[Shift]:
    """How far the crossovers of each kind moved together; those that a limit makes stay out."""
    steps: dict[tuple[str, str, str], list[float]] = {}
    for answer, line, match in _lines(ours, theirs):
        if _kinds(line) == _kinds(match):
            for before, after in zip(line.edges, match.edges, strict=True):
                if not before.limit and not after.limit:
                    kind = (answer, before.left, before.right)
                    steps.setdefault(kind, []).append(log(after.value / before.value))
    return [_shift(kind, some) for kind, some in steps.items()]


def _shift(kind: tuple[str, str, str], steps: Sequence[float]) -> Shift:
    mean = fmean(steps)
    half = 2 * stdev(steps) / len(steps) ** 0.5 if len(steps) > 2 else inf
    return Shift(*kind, len(steps), exp(mean), exp(mean - half), exp(mean + half))


def _moved(ours: Section, theirs: Section) -> Iterator[Moved]:
    differing = {(one.answer, one.batch) for one in other_winners(ours, theirs)}
    for answer, line, match in _lines(ours, theirs):
        mode = f"{line.slice.mode}, " if line.slice.mode != Mode.EXTEND else ""
        found = Moved(answer, f"{mode}{line.slice.label}", line.summary, match.summary, None)
        if _kinds(line) == _kinds(match):
            steps = [step for step in map(_step, line.edges, match.edges) if step is not None]
            if steps:
                yield replace(found, by=max(steps, key=lambda step: abs(log(step))))
        elif any((answer, str(line.slice.batch(value))) in differing
                 for value in line.slice.values):  # fmt: skip
            yield found


def _lines(ours: Section, theirs: Section) -> Iterator[tuple[str, Line, Line]]:
    """(question, line, the same line on the other side)."""
    for answer, one, other in _answers(ours, theirs):
        matches = {_place(line): line for line in other.lines}
        for line in one.lines:
            if _place(line) in matches:
                yield answer, line, matches[_place(line)]


def _kinds(line: Line) -> list[tuple[str, str]]:
    return [(edge.left, edge.right) for edge in line.edges]


def _answers(ours: Section, theirs: Section) -> Iterator[tuple[str, AnswerReport, AnswerReport]]:
    others = {answer.answer.name: answer for answer in theirs.answers}
    for answer in ours.answers:
        if answer.answer.name in others:
            yield answer.answer.name, answer, others[answer.answer.name]


def _cells(one: AnswerReport, other: AnswerReport) -> Iterator[tuple[Cell, Cell]]:
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
    """How far a crossover moved, as a factor; None when it may be where it was."""
    step = after.value / before.value
    if before.limit and after.limit:
        return step if step != 1 else None
    apart = not before.low <= after.value <= before.high
    apart = apart and not after.low <= before.value <= after.high
    return step if apart and abs(log(step)) > log(1 + _APART) else None
