"""Figures: the charts of a report, each with its rows and a name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
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
from nsa_tune.reports.charts.theme import SCHEMA, Spec, with_rows
from nsa_tune.reports.charts.winner_map import winner_map


def figures_of(report: Report) -> dict[str, Spec]:
    """An overview of each question of `report` and the axis that its lines run along, by the name
    of its file without the suffix. With several tables the names begin with the table's."""
    figures: dict[str, Spec] = {}
    counts = Counter[str]()
    for section in report.sections:
        key = section.key
        slug = _plain(f"{key.gpu} {key.model} h{key.heads} {key.kv_layout}")
        start = f"{slug}-" if len(report.sections) > 1 else ""
        for question in section.questions:
            for lines in question.line_groups:
                name = f"{start}{_plain(f'{question.name} overview')}"
                counts[name] += 1
                unique = name if counts[name] == 1 else f"{name}-{counts[name]}"
                figures[unique] = _overview(section, question, lines)
    return figures


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


def _overview(section: Section, question: QuestionReport, lines: Sequence[Line]) -> Spec:
    """The map with the line to show first, beside the curves of that line."""
    chosen = lines[most_telling(lines)]
    facet = facet_of(chosen)
    by_batch = {cell.batch: cell for cell in question.cells}
    cells = [row for row in map_rows(map_cells(by_batch, lines)) if row["facet"] == facet]
    left = with_rows(
        winner_map(*axis_titles(lines), question.measured, *map_size(cells)), {"cells": cells}
    )
    right = with_rows(line_curves(question, lines), curve_rows(question, chosen))
    return {
        "$schema": SCHEMA,
        "params": left.pop("params"),
        "title": {
            "text": chosen.sentence, "subtitle": section.title, "fontSize": 17,
            "subtitleFontSize": 13, "offset": 14,
        },
        "datasets": {**left.pop("datasets"), **right.pop("datasets")},
        "hconcat": [
            {**left, "title": _caption(
                f"Fastest{_where(facet)}. Hatched: no other is allowed. Number: 2nd / 1st"
            )},
            {**right, "width": 420, "title": _caption(f"Time{_where(chosen.slice.label)}")},
        ],
        "spacing": 40,
        # Each panel has its own scales; the first one's legend names the colours of both.
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
    }  # fmt: skip


def _caption(text: str) -> Spec:
    return {"text": text, "fontSize": 12, "fontWeight": 500, "offset": 10}


def _where(words: str) -> str:
    return f", {words}" if words else ""
