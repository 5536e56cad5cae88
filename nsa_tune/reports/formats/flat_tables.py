"""Flat tables over all sections of a report, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nsa_tune._errors import UnknownName
from nsa_tune.reports.analysis.report import Report, Section

Row = tuple[str | int | float | None, ...]


@dataclass(frozen=True, slots=True)
class FlatTable:
    """Columns, and a function that gives the rows of a report."""

    columns: tuple[str, ...]
    rows: Callable[[Report], Iterator[Row]]


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_WHO = ("gpu", "model", "heads", "kv_layout")


def _who(section: Section) -> Row:
    key = section.key
    return (key.gpu, key.model, key.heads, key.kv_layout)


def _crossovers(report: Report) -> Iterator[Row]:
    for section in report.sections:
        for question in section.questions:
            for line in question.lines:
                along = line.slice
                start = (*_who(section), question.name, str(along.mode), along.label)
                for edge in line.edges:
                    yield (*start, along.axis, edge.left, edge.right, edge.value, edge.low,
                           edge.high, edge.limit)  # fmt: skip


def _cells(report: Report) -> Iterator[Row]:
    for section in report.sections:
        for question in section.questions:
            for cell in question.cells:
                start = (*_who(section), question.name, cell.word)
                end = (cell.choice or "", cell.verdict, cell.default)
                for choice, time in cell.times.items():
                    yield (*start, choice, time.arm, time.latency_us, time.low_us, time.high_us,
                           time.samples, *end)  # fmt: skip


def _costs(report: Report) -> Iterator[Row]:
    for section in report.sections:
        for question in section.questions:
            costs = ((report.baseline, question.default_cost), ("table", question.tuned_cost))
            for who, cost in costs:
                if cost is not None:
                    yield (*_who(section), question.name, who, cost.batches, cost.geomean,
                           cost.worst, cost.worst_batch, cost.unmeasured)  # fmt: skip


def _failures(report: Report) -> Iterator[Row]:
    for section in report.sections:
        for one in section.failures:
            for batch in one.batches:
                yield (*_who(section), one.point, batch, one.arm, one.status, one.reason)


def _steps(report: Report) -> Iterator[Row]:
    for section in report.sections:
        for layer in section.layers:
            for one in layer.steps:
                yield (*_who(section), layer.batch, layer.layers, one.name, one.point, one.arm,
                       one.latency_us, one.pass_us, one.default, one.default_us, one.least_us,
                       one.bound, one.note)  # fmt: skip


FLAT = {
    "crossovers": FlatTable(
        (*_WHO, "question", "mode", "slice", "axis", "left", "right", "value", "low", "high",
         "limit"),
        _crossovers,
    ),
    "cells": FlatTable(
        (*_WHO, "question", "batch", "choice", "arm", "latency_us", "low_us", "high_us",
         "samples", "chosen", "verdict", "default"),
        _cells,
    ),
    "costs": FlatTable(
        (*_WHO, "question", "who", "batches", "geomean", "worst", "worst_batch", "unmeasured"),
        _costs,
    ),
    "steps": FlatTable(
        (*_WHO, "batch", "layers", "step", "point", "arm", "latency_us", "pass_us", "default",
         "default_us", "least_us", "bound", "note"),
        _steps,
    ),
    "failures": FlatTable((*_WHO, "point", "batch", "arm", "status", "reason"), _failures),
}  # fmt: skip


def as_csv(report: Report, name: str = "crossovers") -> str:
    """The flat table `name` of `report` as CSV.

    Raises:
        UnknownName: when there is no such table.
    """
    if name not in FLAT:
        raise UnknownName.of("table", name, list(FLAT))
    table = FLAT[name]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(map(_harmless, table.rows(report)))
    return out.getvalue()


def _harmless(row: Row) -> Row:
    """`row`, of which a spreadsheet runs nothing: a text that it would take for a formula gets a
    quote in front, which it shows as text."""
    return tuple(
        f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in row
    )
