"""The measured cells of a report as one flat table, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from nsa_tune.reports.analysis.report import Report

Row = tuple[str | int | float | None, ...]

COLUMNS = (
    "gpu", "model", "heads", "kv_layout", "question", "batch", "choice", "arm", "latency_us",
    "low_us", "high_us", "samples", "chosen", "verdict", "default",
)  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def as_csv(report: Report) -> str:
    """One row for each choice on each measured batch."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(map(_harmless, _cells(report)))
    return out.getvalue()


def _cells(report: Report) -> Iterator[Row]:
    for section in report.sections:
        key = section.key
        for question in section.questions:
            for cell in question.cells:
                start = (key.gpu, key.model, key.heads, key.kv_layout, question.name, cell.word)
                end = (cell.choice or "", cell.verdict, cell.default)
                for choice, time in cell.times.items():
                    yield (*start, choice, time.arm, time.latency_us, time.low_us, time.high_us,
                           time.samples, *end)  # fmt: skip


def _harmless(row: Row) -> Row:
    """`row`, of which a spreadsheet runs nothing: a text that it would take for a formula gets a
    quote in front, which it shows as text."""
    return tuple(
        f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in row
    )
