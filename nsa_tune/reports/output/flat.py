"""Flat tables over all sections of a report, one row a fact: what CSV and pandas frames hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nsa_tune.reports.content.report import Report, Section

__all__ = ["FLAT", "FlatTable", "Row"]

Row = tuple[str | int | float | None, ...]


@dataclass(frozen=True, slots=True)
class FlatTable:
    """Columns, and the rows that a report gives for them."""

    columns: tuple[str, ...]
    rows: Callable[[Report], Iterator[Row]]


_WHO = ("gpu", "model", "heads", "kv_layout")


def _who(section: Section) -> Row:
    key = section.key
    return (key.gpu, key.model, key.heads, key.kv_layout)


def _crossovers(report: Report) -> Iterator[Row]:
    for section in report.sections:
        for answer in section.answers:
            for line in answer.lines:
                along = line.slice
                start = (*_who(section), answer.answer.name, str(along.mode), along.label)
                for edge in line.edges:
                    yield (*start, along.axis, edge.left, edge.right, edge.value, edge.low,
                           edge.high, edge.limit)  # fmt: skip


def _cells(report: Report) -> Iterator[Row]:
    for section in report.sections:
        for answer in section.answers:
            for cell in answer.cells:
                start = (*_who(section), answer.answer.name, cell.word)
                end = (cell.choice or "", cell.verdict, cell.default)
                for choice, time in cell.times.items():
                    yield (*start, choice, time.arm, time.latency_us, time.low_us, time.high_us,
                           time.samples, *end)  # fmt: skip


def _costs(report: Report) -> Iterator[Row]:
    for section in report.sections:
        for answer in section.answers:
            for who, cost in ((report.rule, answer.default_cost), ("table", answer.tuned_cost)):
                if cost is not None:
                    yield (*_who(section), answer.answer.name, who, cost.batches, cost.geomean,
                           cost.worst, cost.worst_batch, cost.unmeasured)  # fmt: skip


def _failures(report: Report) -> Iterator[Row]:
    for section in report.sections:
        for one in section.failures:
            for batch in one.batches:
                yield (*_who(section), one.point, batch, one.arm, one.status, one.reason)


def _chunks(report: Report) -> Iterator[Row]:
    for section in report.sections:
        for point in section.points:
            for curve in point.chunks:
                for one in curve.points:
                    yield (*_who(section), point.point.name, curve.prompt, one.chunk, one.total_us,
                           one.default_us, " ".join(one.arms), one.extrapolated)  # fmt: skip


def _roofline(report: Report) -> Iterator[Row]:
    for section in report.sections:
        for point in section.points:
            for one in point.achieved:
                yield (*_who(section), one.point, one.batch, one.arm, one.precision,
                       one.intensity, one.flops_per_s, one.bytes_per_s, one.share,
                       one.bound)  # fmt: skip


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
    "chunks": FlatTable(
        (*_WHO, "point", "prompt", "chunk", "total_us", "default_us", "arms", "extrapolated"),
        _chunks,
    ),
    "roofline": FlatTable(
        (*_WHO, "point", "batch", "arm", "precision", "flops_a_byte", "flops_per_s",
         "bytes_per_s", "share", "bound"),
        _roofline,
    ),
    "failures": FlatTable((*_WHO, "point", "batch", "arm", "status", "reason"), _failures),
}  # fmt: skip
