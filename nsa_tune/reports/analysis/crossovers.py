"""Crossovers: where the fastest choice changes along a line of batches, and how sure that is.

A choice is sure at a value where `decide` gives the verdict "win" or "only". The interval of a
crossover runs from the last value at which the left choice is sure to the first at which the right
one is. Its value is where the two estimates cross.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from math import inf, isqrt

from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.decide import Choice, Verdict
from nsa_tune.backend.types.point import Question
from nsa_tune.reports.analysis.cached_policy import CachedPolicy
from nsa_tune.reports.analysis.slices import Slice
from nsa_tune.reports.analysis.words import question_title

_At = Callable[[int], Choice]
_SURE = frozenset({Verdict.WIN, Verdict.ONLY})


@dataclass(frozen=True, slots=True)
class Range:
    """A stretch of values with the same choice, both ends included."""

    choice: str | None
    """None where no choice is sure to win."""
    verdict: str
    start: int
    stop: int

    @property
    def label(self) -> str:
        """The choice, or the verdict where there is none."""
        return self.choice or self.verdict


@dataclass(frozen=True, slots=True)
class Edge:
    """A crossover: one choice ends and the next begins."""

    left: str
    right: str
    value: int
    """The first value at which the right choice is taken."""
    low: int
    """The last value at which the left choice is sure to win."""
    high: int
    """The first value at which the right choice is sure to win; `value` where a limit decides."""
    limit: str = ""
    """The guard that ends the left choice; empty where time decides."""

    @property
    def interval(self) -> str:
        """The interval as it is printed after the value: ``(280-350)``, or ``(limit)``."""
        return "(limit)" if self.limit else f"({self.low}-{self.high})"


@dataclass(frozen=True, slots=True)
class Line:
    """One question along one slice."""

    question: str
    slice: Slice
    ranges: tuple[Range, ...]
    edges: tuple[Edge, ...]
    samples: tuple[tuple[int, Mapping[str, Estimate]], ...]
    """(value, estimate of each allowed choice), at enough values to draw curves."""

    @property
    def summary(self) -> str:
        """The ranges as one clause: ``mla until 310 new tokens (280-350), then mha``."""
        edges = {edge.value: edge for edge in self.edges}
        words: list[str] = []
        for here, following in pairwise(self.ranges):
            edge = edges.get(following.start)
            amount = str(here.stop) if words else self.slice.amount(here.stop)
            behind = f" {edge.interval}" if edge else ""
            words.append(f"{here.label} until {amount}{behind}")
        last = self.ranges[-1].label
        return ", then ".join([*words, last]) if words else f"{last} throughout"

    @property
    def sentence(self) -> str:
        """Question, slice and ranges in one sentence."""
        where = f", {self.slice.label}" if self.slice.label else ""
        return f"{question_title(self.question, self.slice.mode)}{where}: {self.summary}"


def trace(question: Question, policy: CachedPolicy, line: Slice) -> Line:
    """The ranges and crossovers of `question` along `line`, from its first value to its last."""

    @cache
    def at(value: int) -> Choice:
        return policy.decide(question, line.batch(value))

    def limited(value: int) -> Set[str]:
        return policy.refused(line.batch(value))

    positions = sorted(_positions(limited, line.values))
    runs = _merged(_runs(at, positions))
    edges = [_edge(at, a, b) for a, b in pairwise(runs) if a.choice and b.choice]
    borders = [_border(at, a, b, edges) for a, b in pairwise(runs)]
    starts = [runs[0].start, *borders]
    stops = [*(border - 1 for border in borders), runs[-1].stop]
    ranges = (
        Range(run.choice, run.verdict, start, stop)
        for run, start, stop in zip(runs, starts, stops, strict=True)
    )
    shown = sorted({*positions, *(edge.value for edge in edges)})
    samples = tuple((value, at(value).estimates) for value in shown)
    return Line(question.name, line, tuple(ranges), tuple(edges), samples)


def _border(at: _At, left: Range, right: Range, edges: list[Edge]) -> int:
    """The first value that belongs to `right`."""
    for edge in edges:
        if left.stop < edge.value <= right.start:
            return edge.value
    return _first(lambda value: _sure(at(value)) != left.choice, left.stop, right.start)


def _sure(choice: Choice) -> str | None:
    return choice.choice if choice.verdict in _SURE else None


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first value where `holds`, which is false at `low` and true at `high`."""
    while high - low > 1:
        middle = isqrt(low * high) if high > 2 * low else (low + high) // 2
        middle = min(max(middle, low + 1), high - 1)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _positions(limited: Callable[[int], Set[str]], values: Sequence[int]) -> set[int]:
    """The values to look at: those measured, one between each pair, and both sides of every limit.

    `limited` gives the arms that guards forbid at a value; a limit is where that changes.
    """
    found = set(values)
    found |= {max(isqrt(low * high), low) for low, high in pairwise(values)}
    for low, high in pairwise(sorted(found)):
        here = low
        while (forbidden := limited(here)) != limited(high):
            here = _first(_unlike(limited, forbidden), here, high)
            found |= {here - 1, here}
    return found


def _unlike(limited: Callable[[int], Set[str]], forbidden: Set[str]) -> Callable[[int], bool]:
    return lambda value: limited(value) != forbidden


def _runs(at: _At, positions: list[int]) -> Iterator[Range]:
    for choice, group in groupby(positions, key=lambda value: _sure(at(value))):
        members = list(group)
        verdicts = [str(at(value).verdict) for value in members]
        # The most frequent verdict speaks for the whole stretch.
        verdict = max(set(verdicts), key=verdicts.count)
        yield Range(choice, verdict, members[0], members[-1])


def _merged(runs: Iterator[Range]) -> list[Range]:
    """`runs` without unsure stretches between sure ones: an edge's interval covers those."""
    every = list(runs)
    kept: list[Range] = []
    for i, run in enumerate(every):
        if run.choice is None and 0 < i < len(every) - 1:
            continue
        if kept and run.choice is not None and kept[-1].choice == run.choice:
            kept[-1] = Range(run.choice, run.verdict, kept[-1].start, run.stop)
        else:
            kept.append(run)
    return kept


def _edge(at: _At, left: Range, right: Range) -> Edge:
    a, b = left.choice, right.choice
    assert a is not None and b is not None

    def passed(value: int) -> bool:
        here = at(value)
        if a in here.forbidden or b in here.forbidden:
            return a in here.forbidden
        times = {name: one.latency_us for name, one in here.estimates.items()}
        return times.get(b, inf) < times.get(a, inf)

    value = _first(passed, left.stop, right.start)
    limit = at(value).forbidden.get(a) or at(value - 1).forbidden.get(b)
    if limit:
        return Edge(a, b, value, value - 1, value, limit)
    low = _first(lambda x: _sure(at(x)) != a, left.stop, value) - 1
    high = _first(lambda x: x >= value and _sure(at(x)) == b, value - 1, right.start)
    return Edge(a, b, value, low, high)
