"""A report as one JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from nsa_tune.reports.analysis.cells import Cell
from nsa_tune.reports.analysis.costs import Cost
from nsa_tune.reports.analysis.crossovers import Line
from nsa_tune.reports.analysis.report import QuestionReport, Report, Section
from nsa_tune.reports.formats.plain import source_name

SCHEMA = "nsa-tune/report/3"


def report_document(report: Report) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "baseline": report.baseline,
        "sections": [_section(section) for section in report.sections],
    }


def _section(section: Section) -> dict[str, Any]:
    table = section.table
    return {
        "key": section.key.as_document(),
        "digest": section.key.digest,
        "device": asdict(table.device),
        "source": source_name(table.source),
        "measured_at": table.measured_at,
        "measurements": len(table.measurements),
        "answers": [
            {**asdict(answer), "sentence": answer.sentence, "basis": answer.basis}
            for answer in section.answers
        ],
        "points": [
            {
                "point": point.point.name,
                "questions": [_question(question) for question in point.questions],
            }
            for point in section.points
        ],
        "layers": [asdict(layer) for layer in section.layers],
        "ceilings": None if section.ceilings is None else asdict(section.ceilings),
        "failures": [asdict(failure) for failure in section.failures],
    }


def _question(question: QuestionReport) -> dict[str, Any]:
    return {
        "question": question.name,
        "choices": list(question.choices),
        "measured": list(question.measured),
        "lines": [_line(line) for line in question.lines],
        "cost": {"default": _cost(question.default_cost), "table": _cost(question.tuned_cost)},
        "cells": [_cell(cell) for cell in question.cells],
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
    return json.dumps(report_document(report), ensure_ascii=False) + "\n"
