"""Figures: the charts of a report, each with its rows and a name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

from nsa_tune.reports.analysis.crossovers import Line
from nsa_tune.reports.analysis.report import QuestionReport, Report, Section
from nsa_tune.reports.analysis.slices import UNITS
from nsa_tune.reports.charts.curves import curves
from nsa_tune.reports.charts.rows import (
    curve_rows,
    facet_of,
    map_cells,
    map_rows,
    map_size,
)
from nsa_tune.reports.charts.spikes import calm_curves
from nsa_tune.reports.charts.theme import SCHEMA, Chart, Rows, Spec
from nsa_tune.reports.charts.winner_map import winner_map


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart to draw into a file."""

    name: str
    """The file's name without its suffix."""
    spec: Spec
    """With its data sets."""


def figures_of(report: Report) -> Iterator[Figure]:
    """An overview of each question of `report` and the axis that its lines run along.

    With several tables the names begin with the table's.
    """
    taken: set[str] = set()
    for section in report.sections:
        start = f"{_slug(section)}-" if len(report.sections) > 1 else ""
        for name, spec in _of_section(section):
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
    """`text` as a part of a file name. A GPU's name may come from any database."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unnamed"


def axis_titles(lines: Sequence[Line]) -> tuple[str, str]:
    """The titles of x and y for lines that run along one axis."""
    along = lines[0].slice
    return along.unit.removesuffix(" each"), UNITS[along.fixed[-1][0]]


def most_telling(lines: Sequence[Line]) -> int:
    """Index of the line to show first.

    It is on the first map that has a crossover, and its crossover is nearest to the middle.
    """
    facets = list(dict.fromkeys(facet_of(line) for line in lines))

    def rank(line: Line) -> tuple[bool, int, float]:
        crossings = [edge for edge in line.edges if not edge.limit]
        if not crossings:
            return True, 0, 0.0
        low, high = max(line.slice.values[0], 1), line.slice.values[-1]
        off = abs(log(crossings[0].value) - (log(low) + log(high)) / 2)
        return False, facets.index(facet_of(line)), off

    return min(range(len(lines)), key=lambda i: (rank(lines[i]), i))


def line_curves(question: QuestionReport, lines: Sequence[Line]) -> Spec:
    """The spec of the curves of each of `lines`, which run along one axis."""
    from_zero = any(line.slice.values[0] == 0 for line in lines)
    return curves(axis_titles(lines)[0], question.measured, from_zero=from_zero)


# --- the overviews


def _of_section(section: Section) -> Iterator[tuple[str, Spec]]:
    for question in section.questions:
        for lines in question.line_groups:
            yield _plain(f"{question.name} overview"), _overview(section, question, lines)


def _overview(section: Section, question: QuestionReport, lines: Sequence[Line]) -> Spec:
    """The map with the line to show first, beside the curves of that line."""
    chosen = lines[most_telling(lines)]
    facet = facet_of(chosen)
    by_batch = {cell.batch: cell for cell in question.cells}
    cells = [row for row in map_rows(map_cells(by_batch, lines)) if row["facet"] == facet]
    spec = winner_map(*axis_titles(lines), question.measured, *map_size(cells))
    shown = calm_curves(curve_rows(question, chosen))
    caption = f"Fastest{_where(facet)}. Hatched: no other is allowed. Number: 2nd / 1st"
    panels = {
        caption: Chart(spec, {"cells": cells}),
        f"Time{_where(chosen.slice.label)}. {shown.note}".rstrip(" ."): Chart(
            line_curves(question, lines), shown.rows
        ),
    }
    return _side_by_side(chosen.sentence, section.title, panels)


def _where(words: str) -> str:
    return f", {words}" if words else ""


def _side_by_side(title: str, subtitle: str, panels: Mapping[str, Chart]) -> Spec:
    """`panels`, by their captions, side by side under `title`."""
    parts: list[Spec] = []
    datasets: dict[str, Rows] = {}
    params: list[Spec] = []
    for caption, chart in panels.items():
        drawn = chart.complete
        datasets.update(drawn.pop("datasets"))
        params += drawn.pop("params", ())
        drawn.pop("$schema")
        if drawn.get("width") == "container":
            drawn["width"] = 420
        drawn["title"] = {"text": caption, "fontSize": 12, "fontWeight": 500, "offset": 10}
        parts.append(drawn)
    return {
        "$schema": SCHEMA,
        "params": params,
        "title": {"text": title, "subtitle": subtitle, "fontSize": 17, "subtitleFontSize": 13,
                  "offset": 14},
        "hconcat": parts,
        "spacing": 40,
        "datasets": datasets,
        # Each panel has its own scales; the first one's legend names the colours of both.
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
    }  # fmt: skip
