"""What the page's script draws: specs and rows, packed into few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nsa_tune.reports import charts
from nsa_tune.reports.charts.theme import Rows
from nsa_tune.reports.content.crossovers import Line
from nsa_tune.reports.content.report import AnswerReport, PointReport, Section
from nsa_tune.reports.output.chart_rows import (
    FASTEST,
    chunk_rows,
    cost_rows,
    edge_rows,
    estimate_rows,
    facet_of,
    map_cells,
    map_rows,
    map_size,
    roof_rows,
    scatter_rows,
    time_rows,
)
from nsa_tune.reports.output.figures import axis_titles, most_telling

__all__ = ["chunk_plot", "cost_plot", "line_panel", "roof_plot", "scatter_plot"]


def line_panel(answer: AnswerReport, lines: tuple[Line, ...]) -> dict[str, Any]:
    """The winner maps of `lines`, and the curves of each.

    A measured time is in it once: the curves' points and the map's tooltips are made from it.
    """
    x_title, y_title = axis_titles(lines)
    placed = list(map_cells({cell.batch: cell for cell in answer.cells}, lines))
    cells = map_rows(placed)
    return {
        "map": charts.winner_map(x_title, y_title, answer.measured, *map_size(cells)),
        "cells": _columns(cells),
        "times": _columns(
            [{"cell": i, **row} for i, (_, _, cell) in enumerate(placed) for row, _ in
             time_rows(cell)]
        ),
        "curves": charts.curves(
            x_title, answer.measured, from_zero=any(line.slice.values[0] == 0 for line in lines)
        ),
        "first": most_telling(lines),
        "lines": [
            {
                "facet": facet_of(line),
                "y": line.slice.fixed[-1][1],
                "label": line.slice.label,
                "sentence": line.summary,
                "estimates": _columns(
                    sorted(estimate_rows(line), key=lambda row: (row["choice"], row["x"]))
                ),
                "edges": _columns(edge_rows(line)),
            }
            for line in lines
        ],
    }  # fmt: skip


def cost_plot(answer: AnswerReport) -> dict[str, Any] | None:
    """What the engine's rule costs; None where it has no cost."""
    rows = cost_rows(answer)
    if not rows["costs"] or not rows["mean"]:
        return None
    worst = max(row["cost"] for row in rows["costs"])
    spec = charts.default_costs("new tokens in the batch", answer.measured, worst)
    return _plot(spec, rows)


def scatter_plot(answer: AnswerReport) -> dict[str, Any] | None:
    """The winners of ragged batches; None without any, or with one choice only."""
    rows = scatter_rows(answer) if len(answer.measured) > 1 else None
    return None if rows is None else _plot(charts.winner_scatter(answer.measured), rows)


def chunk_plot(point: PointReport, rule: str) -> dict[str, Any]:
    """Prefill rate against chunk size."""
    prompts = [str(curve.prompt) for curve in point.chunks]
    spec = charts.chunk_rates(prompts, [FASTEST, rule])
    return _plot(spec, {"chunks": chunk_rows(point.chunks, rule)})


def roof_plot(section: Section, point: PointReport) -> dict[str, Any]:
    """Achieved rates, under the table's ceilings where it has some."""
    arms = list(dict.fromkeys(one.arm for one in point.achieved))
    return _plot(charts.roofline(arms), roof_rows(point.achieved, section.ceilings))


def _plot(spec: charts.Spec, rows: dict[str, Rows]) -> dict[str, Any]:
    return {"spec": spec, "rows": {name: _columns(some) for name, some in rows.items()}}


def _columns(rows: Rows) -> dict[str, Any]:
    """`rows` by field: names come once, and like values side by side deflate well."""
    return {field: _column([row[field] for row in rows]) for field in (rows[0] if rows else ())}


def _column(values: Sequence[Any]) -> Any:
    """The values; texts that repeat as numbers of words."""
    if not all(isinstance(value, str) for value in values):
        return values
    words = {word: i for i, word in enumerate(dict.fromkeys(values))}
    if len(words) == len(values):
        return values
    return {"words": list(words), "at": [words[value] for value in values]}
