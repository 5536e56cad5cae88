"""Every chart of a report with its rows, by name: what pictures are drawn from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

from nsa_tune.reports import charts
from nsa_tune.reports.charts.theme import Rows, Spec
from nsa_tune.reports.content.crossovers import Line
from nsa_tune.reports.content.report import AnswerReport, PointReport, Report, Section
from nsa_tune.reports.content.slices import UNITS
from nsa_tune.reports.output.chart_rows import (
    FASTEST,
    chunk_rows,
    cost_rows,
    curve_rows,
    facet_of,
    map_cells,
    map_rows,
    map_size,
    roof_rows,
    scatter_rows,
)
from nsa_tune.reports.output.grids import bundles_of, title_of

__all__ = ["Figure", "axis_titles", "figures_of", "most_telling"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart."""

    name: str
    """A file's name without its ending."""
    spec: Spec
    """Complete: its data sets are in it."""


def figures_of(report: Report) -> Iterator[Figure]:
    """All charts of `report`; of the curves, those on which something crosses.

    With several tables a name begins with its table's.
    """
    taken: set[str] = set()
    for section in report.sections:
        start = f"{_slug(section)}-" if len(report.sections) > 1 else ""
        for name, spec in _of_section(section, report.rule):
            unique, i = f"{start}{name}", 1
            while unique in taken:
                i += 1
                unique = f"{start}{name}-{i}"
            taken.add(unique)
            yield Figure(unique, spec)


def _slug(section: Section) -> str:
    key = section.key
    return _plain(f"{key.gpu} {key.model} h{key.heads} {key.kv_layout}")


def _plain(text: str) -> str:
    """`text` as a part of a file's name: a GPU's name comes out of a database."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unnamed"


def axis_titles(lines: tuple[Line, ...]) -> tuple[str, str]:
    """The titles of x and y for lines that run along one axis."""
    along = lines[0].slice
    return along.unit.removesuffix(" each"), UNITS[along.fixed[-1][0]]


def most_telling(lines: Sequence[Line]) -> int:
    """The line to show first: on the first map that has a crossover, the line where times cross
    nearest to the middle."""
    facets = list(dict.fromkeys(facet_of(line) for line in lines))

    def rank(line: Line) -> tuple[bool, int, float]:
        crossings = [edge for edge in line.edges if not edge.limit]
        if not crossings:
            return True, 0, 0.0
        low, high = max(line.slice.values[0], 1), line.slice.values[-1]
        off = abs(log(crossings[0].value) - (log(low) + log(high)) / 2)
        return False, facets.index(facet_of(line)), off

    return min(range(len(lines)), key=lambda i: (rank(lines[i]), i))


def _of_section(section: Section, rule: str) -> Iterator[tuple[str, Spec]]:
    for answer in section.answers:
        for lines in bundles_of(answer):
            yield from _of_lines(section, answer, lines)
        if len(answer.measured) > 1 and (batches := scatter_rows(answer)):
            spec = charts.with_rows(charts.winner_scatter(answer.measured), batches)
            yield _plain(f"{answer.answer.name} batches"), spec
        rows = cost_rows(answer)
        if rows["costs"] and rows["mean"]:
            worst = max(row["cost"] for row in rows["costs"])
            spec = charts.default_costs("new tokens in the batch", answer.measured, worst)
            yield _plain(f"{answer.answer.name} cost"), charts.with_rows(spec, rows)
    for point in section.points:
        yield from _of_point(section, point, rule)


def _of_lines(
    section: Section, answer: AnswerReport, lines: tuple[Line, ...]
) -> Iterator[tuple[str, Spec]]:
    question = answer.answer.name
    by_batch = {cell.batch: cell for cell in answer.cells}
    rows = map_rows(map_cells(by_batch, lines))
    titles = axis_titles(lines)
    maps: dict[str, tuple[Spec, Mapping[str, Rows]]] = {}
    for facet in dict.fromkeys(facet_of(line) for line in lines):
        own = {"cells": [row for row in rows if row["facet"] == facet]}
        spec = charts.winner_map(*titles, answer.measured, *map_size(own["cells"]))
        maps[facet] = spec, own
        yield _plain(f"{question} map {facet}"), charts.with_rows(spec, own)
    from_zero = any(line.slice.values[0] == 0 for line in lines)
    spec = charts.curves(titles[0], answer.measured, from_zero=from_zero)
    for line in lines:
        if line.edges:
            drawn = charts.with_rows(spec, curve_rows(answer, line))
            yield _plain(f"{question} curves {line.slice.label}"), drawn
    chosen = lines[most_telling(lines)]
    caption = f"Fastest{_where(facet_of(chosen))}. Hatched: no other is allowed. Number: 2nd / 1st"
    panels = {
        caption: maps[facet_of(chosen)],
        f"Time{_where(chosen.slice.label)}": (spec, curve_rows(answer, chosen)),
    }
    yield (
        _plain(f"{question} overview"),
        charts.overview(chosen.sentence, title_of(section), panels),
    )


def _where(words: str) -> str:
    return f", {words}" if words else ""


def _of_point(section: Section, point: PointReport, rule: str) -> Iterator[tuple[str, Spec]]:
    name = point.point.name
    if point.chunks:
        prompts = [str(curve.prompt) for curve in point.chunks]
        spec = charts.chunk_rates(prompts, [FASTEST, rule])
        rows = {"chunks": chunk_rows(point.chunks, rule)}
        yield _plain(f"{name} chunk size"), charts.with_rows(spec, rows)
    if point.achieved:
        arms = list(dict.fromkeys(one.arm for one in point.achieved))
        roof = roof_rows(point.achieved, section.ceilings)
        yield _plain(f"{name} roofline"), charts.with_rows(charts.roofline(arms), roof)
