"""The rows of the charts' data sets, from the records of a report."""

from __future__ import annotations

from collections.abc import Iterable

from nsa_tune.reports.cells import Cell, Time
from nsa_tune.reports.charts import Rows
from nsa_tune.reports.crossovers import Edge, Line
from nsa_tune.reports.report import AnswerReport

__all__ = ["curve_rows", "facet_of", "map_rows"]


def facet_of(line: Line) -> str:
    """The lengths that a winner map holds fixed along `line`: ``4 sequences``, or ""."""
    return ", ".join(_words(name, value) for name, value in line.slice.fixed[:-1])


def _words(name: str, value: int) -> str:
    if name == "sequences":
        return "1 sequence" if value == 1 else f"{value} sequences"
    return f"{name} {value}"


def map_rows(answer: AnswerReport, lines: Iterable[Line]) -> Rows:
    """One row a cell on `lines`: x along it, y its last fixed length; `facet` names the others."""
    by_batch = {str(cell.batch): cell for cell in answer.cells}
    rows = []
    for line in lines:
        for value in line.slice.values:
            cell = by_batch.get(str(line.slice.batch(value)))
            if cell is not None:
                where = {"facet": facet_of(line), "x": value, "y": line.slice.fixed[-1][1]}
                rows.append({**where, **_map_row(cell)})
    return rows


def _map_row(cell: Cell) -> dict[str, object]:
    kinds = {"win": "sure", "only": "only"}
    cost = cell.cost(cell.default)
    rule = f"; the default takes {cell.default}" if cost and cost > 1 else ""
    return {
        "choice": cell.choice or "",
        "kind": kinds.get(cell.verdict, "pale"),
        "margin": None if cell.margin is None else _rounded(cell.margin),
        "batch": str(cell.batch),
        "fastest": f"{cell.choice or 'none'} ({cell.verdict}){rule}",
        "times": "; ".join(f"{name} {_time(time)}" for name, time in cell.times.items()),
        "limit": "; ".join(f"{name}: {clause}" for name, clause in cell.forbidden.items()) or "-",
    }


def curve_rows(answer: AnswerReport, line: Line) -> dict[str, Rows]:
    """The data sets of `charts.curves` for one line."""
    return {
        "estimates": [
            {"x": value, "choice": choice, "us": _rounded(one.latency_us),
             "wide": round(one.high_us / one.latency_us, 3)}
            for value, estimates in line.samples
            for choice, one in estimates.items()
        ],
        "measured": list(_measured(answer.cells, line)),
        "edges": [_edge_row(line, edge) for edge in line.edges],
    }  # fmt: skip


def _measured(cells: Iterable[Cell], line: Line) -> Rows:
    batches = {str(line.slice.batch(value)): value for value in line.slice.values}
    return [
        {"x": batches[str(cell.batch)], "choice": choice, "us": _rounded(time.latency_us),
         "arm": time.arm, "time": _time(time), "samples": time.samples}
        for cell in cells
        if str(cell.batch) in batches
        for choice, time in cell.times.items()
    ]  # fmt: skip


def _edge_row(line: Line, edge: Edge) -> dict[str, object]:
    until = line.slice.amount(edge.value - 1)
    return {
        "x": edge.value - 1,
        "low": edge.low,
        "high": edge.high,
        "limit": edge.limit,
        "text": f"{edge.left} until {until} {edge.interval}, then {edge.right}",
    }


def _time(time: Time) -> str:
    return f"{time.latency_us:.4g} us ({time.low_us:.4g}-{time.high_us:.4g})"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
