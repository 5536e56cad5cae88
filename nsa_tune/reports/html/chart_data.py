"""The data that the page's script draws charts from: specs and rows, in few bytes."""

from __future__ import annotations

from typing import Any

from nsa_tune.reports.analysis.crossovers import Line
from nsa_tune.reports.analysis.report import QuestionReport
from nsa_tune.reports.charts.figures import axis_titles, line_curves, most_telling
from nsa_tune.reports.charts.rows import (
    curve_rows,
    facet_of,
    map_cells,
    map_rows,
    map_size,
    time_rows,
)
from nsa_tune.reports.charts.theme import Rows
from nsa_tune.reports.charts.winner_map import winner_map


def line_panel(question: QuestionReport, lines: tuple[Line, ...]) -> dict[str, Any]:
    """The winner maps of `lines`, and the curves of each.

    Each measured time is stored once; the script makes both the points of the curves and the
    tooltips of the map from it.
    """
    placed = list(map_cells({cell.batch: cell for cell in question.cells}, lines))
    cells = map_rows(placed)
    return {
        "map": winner_map(*axis_titles(lines), question.measured, *map_size(cells)),
        "cells": _columns(cells),
        "times": _columns(
            [{"cell": i, **row} for i, (_, _, cell) in enumerate(placed) for row, _ in
             time_rows(cell)]
        ),
        "curves": line_curves(question, lines),
        "first": most_telling(lines),
        "lines": [_line(question, line) for line in lines],
    }  # fmt: skip


def _line(question: QuestionReport, line: Line) -> dict[str, Any]:
    rows = curve_rows(question, line)
    estimates = sorted(rows["estimates"], key=lambda row: (row["choice"], row["x"]))
    return {
        "facet": facet_of(line),
        "y": line.slice.fixed[-1][1],
        "label": line.slice.label,
        "sentence": line.summary,
        "estimates": _columns(estimates),
        "edges": _columns(rows["edges"]),
    }


def _columns(rows: Rows) -> dict[str, Any]:
    """`rows` as columns: field names occur once, and similar neighbours compress well."""
    return {field: [row[field] for row in rows] for field in (rows[0] if rows else ())}
