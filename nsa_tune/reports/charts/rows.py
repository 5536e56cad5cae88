"""Rows of the charts' data sets, made from the records of a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.counted import counted
from nsa_tune.reports.analysis.cells import Cell
from nsa_tune.reports.analysis.crossovers import Edge, Line
from nsa_tune.reports.analysis.report import QuestionReport
from nsa_tune.reports.charts.theme import Rows

_CLOSE = 1.3
"""Two labels on a logarithmic axis overlap when their values differ by less than this factor."""
_KINDS = {"win": "sure", "only": "only"}


def facet_of(line: Line) -> str:
    """The lengths that are fixed on the winner map of `line`: ``4 sequences``, or ""."""
    return ", ".join(
        counted(value, "sequence") if name == "sequences" else f"{name} {value}"
        for name, value in line.slice.fixed[:-1]
    )


# --- the winner map


def map_cells(
    cells: Mapping[Batch, Cell], lines: Iterable[Line]
) -> Iterator[tuple[Line, int, Cell]]:
    """(line, value on it, cell) of every measured batch on `lines` with an allowed choice."""
    for line in lines:
        for value in line.slice.values:
            cell = cells.get(line.slice.batch(value))
            if cell is not None and cell.choice is not None:
                yield line, value, cell


def map_rows(placed: Iterable[tuple[Line, int, Cell]]) -> Rows:
    """One row for each cell: x along its line, y the last fixed length, `facet` the others."""
    return [
        {"facet": facet_of(line), "x": value, "y": line.slice.fixed[-1][1], **_map_row(cell)}
        for line, value, cell in placed
    ]


def map_size(cells: Rows) -> tuple[int, int]:
    """The largest numbers of columns and rows over the facets."""
    lengths: dict[str, tuple[set[int], set[int]]] = {}
    for cell in cells:
        columns, rows = lengths.setdefault(cell["facet"], (set(), set()))
        columns.add(cell["x"])
        rows.add(cell["y"])
    widest = max((len(columns) for columns, _ in lengths.values()), default=1)
    return widest, max((len(rows) for _, rows in lengths.values()), default=1)


def _map_row(cell: Cell) -> dict[str, object]:
    cost = cell.cost(cell.default)
    baseline = f"; the default takes {cell.default}, {cost:.3g}x" if cost and cost > 1 else ""
    return {
        "choice": cell.choice or "",
        "kind": _KINDS.get(cell.verdict, "pale"),
        "margin": None if cell.margin is None else _rounded(cell.margin),
        "batch": cell.word,
        "fastest": f"{cell.choice or 'none'} ({cell.verdict}){baseline}",
        "limit": "; ".join(f"{name}: {clause}" for name, clause in cell.forbidden.items()) or "-",
    }


# --- curves along a line


def curve_rows(question: QuestionReport, line: Line) -> dict[str, Rows]:
    """The data sets of `curves` for one line."""
    batches = {line.slice.batch(value): value for value in line.slice.values}
    return {
        "estimates": estimate_rows(line),
        "measured": [
            {"x": batches[cell.batch], **row, "over": f"{over:.3g}x"}
            for cell in question.cells
            if cell.batch in batches
            for row, over in time_rows(cell)
        ],
        "edges": edge_rows(line),
    }


def edge_rows(line: Line) -> Rows:
    """The crossovers of one line. One close behind another has no `label`."""
    rows: Rows = []
    for edge in line.edges:
        row = _edge_row(line, edge)
        crowded = any(one["label"] and row["x"] < _CLOSE * one["x"] for one in rows)
        rows.append({**row, "label": "" if crowded else str(row["x"])})
    return rows


def estimate_rows(line: Line) -> Rows:
    """Each choice's estimate at each sampled value; its interval is us / wide to us * wide."""
    return [
        {"x": value, "choice": choice, "us": _rounded(one.latency_us),
         "wide": round(one.high_us / one.latency_us, 3)}
        for value, estimates in line.samples
        for choice, one in estimates.items()
    ]  # fmt: skip


def time_rows(cell: Cell) -> Iterator[tuple[dict[str, object], float]]:
    """(row, time over the best choice's) of each measured choice."""
    for choice, time in cell.times.items():
        row: dict[str, object] = {
            "choice": choice, "arm": time.arm, "us": _rounded(time.latency_us),
            "low": _rounded(time.low_us), "high": _rounded(time.high_us), "samples": time.samples,
        }  # fmt: skip
        yield row, cell.cost(choice) or 1.0


def _edge_row(line: Line, edge: Edge) -> dict[str, Any]:
    until = line.slice.amount(edge.value - 1)
    return {
        "x": edge.value - 1,
        "low": edge.low,
        "high": edge.high,
        "limit": edge.limit,
        "text": f"{edge.left} until {until} {edge.interval}, then {edge.right}",
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
