"""A report as one JSON document, and as CSV and markdown text."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nsa_tune._errors import UnknownName
from nsa_tune.reports.output.flat import FLAT
from nsa_tune.reports.output.grids import Grid, fingerprint, grids_of, title_of
from nsa_tune.reports.output.plain import plain

if TYPE_CHECKING:
    from nsa_tune.reports.content.cells import Cell
    from nsa_tune.reports.content.crossovers import Line
    from nsa_tune.reports.content.default_cost import Cost
    from nsa_tune.reports.content.report import AnswerReport, Report, Section

__all__ = ["SCHEMA", "as_csv", "as_json", "as_markdown", "document"]

SCHEMA = "nsa-tune/report/1"


def document(report: Report) -> dict[str, Any]:
    """`report` as values that JSON can hold."""
    return {
        "schema": SCHEMA,
        "rule": report.rule,
        "sections": [_section(section) for section in report.sections],
    }


def _section(section: Section) -> dict[str, Any]:
    table = section.table
    return {
        "key": {**asdict(section.key), "libraries": dict(section.key.libraries)},
        "digest": section.key.digest,
        "device": asdict(table.device),
        "source": table.source,
        "measured_at": table.measured_at,
        "measurements": len(table.measurements),
        "points": [
            {
                "point": point.point.name,
                "answers": [_answer(answer) for answer in point.answers],
                "chunks": [asdict(curve) for curve in point.chunks],
                "roofline": [asdict(one) for one in point.achieved],
            }
            for point in section.points
        ],
        "ceilings": None if section.ceilings is None else asdict(section.ceilings),
        "failures": [asdict(failure) for failure in section.failures],
    }


def _answer(answer: AnswerReport) -> dict[str, Any]:
    return {
        "answer": answer.answer.name,
        "choices": list(answer.answer.choices),
        "measured": list(answer.measured),
        "lines": [_line(line) for line in answer.lines],
        "cost": {"default": _cost(answer.default_cost), "table": _cost(answer.tuned_cost)},
        "cells": [_cell(cell) for cell in answer.cells],
    }


def _line(line: Line) -> dict[str, Any]:
    return {
        "mode": str(line.slice.mode),
        "axis": line.slice.axis,
        "fixed": dict(line.slice.fixed),
        "values": list(line.slice.values),
        "ranges": [asdict(one) for one in line.ranges],
        "edges": [asdict(edge) for edge in line.edges],
        "sentence": line.sentence,
    }


def _cost(cost: Cost | None) -> dict[str, Any] | None:
    return None if cost is None else asdict(cost)


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "batch": cell.word,
        "choice": cell.choice,
        "verdict": cell.verdict,
        "default": cell.default,
        "default_cost": cell.cost(cell.default),
        "times": {choice: asdict(time) for choice, time in cell.times.items()},
        "forbidden": dict(cell.forbidden),
    }


def as_json(report: Report) -> str:
    """The whole report as JSON text."""
    return json.dumps(document(report), ensure_ascii=False) + "\n"


def as_csv(report: Report, name: str = "crossovers") -> str:
    """One flat table of `report` as CSV text.

    Raises:
        UnknownName: when there is no such table.
    """
    if name not in FLAT:
        raise UnknownName.of("table", name, list(FLAT))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(FLAT[name].columns)
    writer.writerows(FLAT[name].rows(report))
    return out.getvalue()


# --- markdown


def as_markdown(report: Report) -> str:
    """The report as GitHub-flavoured markdown."""
    parts = ["# nsa-tune report\n"]
    for section in report.sections:
        parts.append(f"## {_escaped(title_of(section))}\n")
        card = Grid("", ("field", "value"), tuple(fingerprint(section)))
        parts.append(_table(card))
        for grid in grids_of(section, report.rule):
            parts.append(f"### {_escaped(grid.title)}\n")
            if grid.note:
                parts.append(f"{_escaped(grid.note)}\n")
            parts.append(_table(grid))
    return "\n".join(parts)


def _table(grid: Grid) -> str:
    rule = ["--:" if i in grid.numeric else ":--" for i in range(len(grid.columns))]
    rows = [grid.columns, tuple(rule), *grid.rows]
    escaped = [rows[0], rows[1], *(tuple(map(_escaped, row)) for row in rows[2:])]
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)


_MARKUP = re.compile(r"[\\`*_{}\[\]<>|~&]")


def _escaped(text: str) -> str:
    """`text` as plain words: a name out of a database must not become markup."""
    flat = plain(" ".join(text.split()))
    return _MARKUP.sub(lambda match: f"\\{match[0]}" if match[0] not in "<&" else
                       {"<": "&lt;", "&": "&amp;"}[match[0]], flat)  # fmt: skip
