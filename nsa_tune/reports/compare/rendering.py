"""Comparisons as display tables, as one line, and as one JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Table
from nsa_tune.reports.analysis.words import question_title
from nsa_tune.reports.compare.cell_verdicts import CellVerdict, JudgedCell, percent
from nsa_tune.reports.compare.comparison import Comparison
from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.formats.plain import source_name

SCHEMA = "nsa-tune/compare/3"
_MOST = 15


def title(comparison: Comparison) -> str:
    """The title of a comparison: the setting, and the two sources."""
    key = comparison.after.key
    setting = f"{key.model}, {key.heads} local heads, {key.kv_layout}"
    after, before = comparison.after.source, comparison.before.source
    return f"{setting}: {source_name(after)} against {source_name(before)}"


def conclusion(comparisons: Sequence[Comparison], fail_on: float | None) -> str:
    """One line: the number of cells by verdict, and of regressions by more than `fail_on`."""
    counts = {verdict: sum(pair.counts[verdict] for pair in comparisons) for verdict in CellVerdict}
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    total = sum(counts.values()) - counts[CellVerdict.ONLY_BEFORE] - counts[CellVerdict.ONLY_AFTER]
    if not total:
        return "no cell was measured on both sides"
    same = f"{counted(total, 'cell')}: {words} ({counts[CellVerdict.SAME] / total:.1%} same)"
    if fail_on is None:
        return same
    worse = sum(len(pair.regressions(fail_on)) for pair in comparisons)
    regressions = f"{worse} regressions of" if worse > 1 else (
        "1 regression of" if worse else "none by"
    )  # fmt: skip
    return f"{same}; {regressions} more than {percent(fail_on)}"


def comparison_tables(comparison: Comparison, *, every: bool) -> Iterator[DisplayTable]:
    """The tables of a comparison in reading order; empty ones are left out.

    With `every` all cells are listed, else only those that changed most.
    """
    every_table = [
        _fingerprint(comparison),
        _arms(comparison),
        _winners(comparison),
        _cells(comparison, every=every),
    ]
    return (table for table in every_table if table.rows)


def _fingerprint(comparison: Comparison) -> DisplayTable:
    rows = tuple((diff.field, diff.before, diff.after) for diff in comparison.differences)
    equal = comparison.before.key == comparison.after.key
    note = "GPU, driver, versions and setting are the same." if equal else ""
    return DisplayTable("What differs", ("field", "before", "after"), rows, note=note)


def _arms(comparison: Comparison) -> DisplayTable:
    verdicts = list(CellVerdict)
    rows = [
        (arm.point, arm.arm, "-" if arm.geomean is None else f"{arm.geomean:.3f}x",
         *(str(arm.counts.get(verdict, 0)) for verdict in verdicts))
        for arm in comparison.arms
    ]  # fmt: skip
    columns = ("point", "arm", "mean", *map(str, verdicts))
    return DisplayTable(
        "Arms", columns, tuple(rows), frozenset(range(2, len(columns))),
        note="mean: geometric mean of the time after over the time before; below 1 is faster.",
    )  # fmt: skip


def _winners(comparison: Comparison) -> DisplayTable:
    rows = [
        (question_title(winner.question), winner.batch, winner.before, winner.after)
        for winner in comparison.winners
    ]
    extra = f"And {len(rows) - _MOST} more." if len(rows) > _MOST else ""
    return DisplayTable(
        "Batches with another winner", ("question", "batch", "before", "after"),
        tuple(rows[:_MOST]), note=extra,
    )  # fmt: skip


_ORDER = (
    CellVerdict.BROKEN,
    CellVerdict.SLOWER,
    CellVerdict.FASTER,
    CellVerdict.UNCLEAR,
    CellVerdict.MENDED,
    CellVerdict.ONLY_BEFORE,
    CellVerdict.ONLY_AFTER,
    CellVerdict.SAME,
)


def _cells(comparison: Comparison, *, every: bool) -> DisplayTable:
    def rank(cell: JudgedCell) -> tuple[int, float]:
        ratio = cell.ratio or 1.0
        return _ORDER.index(cell.verdict), -max(ratio, 1 / ratio)

    shown = [cell for cell in comparison.cells if every or cell.verdict is not CellVerdict.SAME]
    shown.sort(key=rank)
    rest = 0 if every else max(len(shown) - _MOST, 0)
    rows = tuple(
        (str(cell.verdict), cell.arm, cell.batch, _us(cell.before_us), _us(cell.after_us),
         cell.reason)
        for cell in (shown if every else shown[:_MOST])
    )  # fmt: skip
    return DisplayTable(
        "Cells" if every else "Cells that are not the same",
        ("verdict", "arm", "batch", "before us", "after us", "reason"),
        rows,
        frozenset({3, 4}),
        note=f"And {rest} more: --all lists every cell." if rest else "",
    )


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def comparison_document(comparisons: Sequence[Comparison], fail_on: float | None) -> dict[str, Any]:
    limit = 0.0 if fail_on is None else fail_on
    regressions = [words for pair in comparisons for words in pair.regressions(limit)]
    return {
        "schema": SCHEMA,
        "conclusion": conclusion(comparisons, fail_on),
        "fail_on": fail_on,
        "regressions": regressions if fail_on is not None else [],
        "comparisons": [_document(pair) for pair in comparisons],
    }


def _document(comparison: Comparison) -> dict[str, Any]:
    return {
        "before": _side(comparison.before),
        "after": _side(comparison.after),
        "differences": [asdict(diff) for diff in comparison.differences],
        "counts": {str(verdict): comparison.counts[verdict] for verdict in CellVerdict},
        "arms": [
            {**asdict(arm), "counts": {str(verdict): n for verdict, n in arm.counts.items()}}
            for arm in comparison.arms
        ],
        "other_winners": [asdict(winner) for winner in comparison.winners],
        "cells": [{**asdict(cell), "verdict": str(cell.verdict)} for cell in comparison.cells],
    }


def _side(table: Table) -> dict[str, Any]:
    return {
        "source": source_name(table.source),
        "digest": table.key.digest,
        "key": table.key.as_document(),
        "measured_at": table.measured_at,
        "measurements": len(table.measurements),
    }
