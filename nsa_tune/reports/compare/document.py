"""A comparison as tables of text, and as one JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from nsa_tune.reports.compare.comparison import Comparison
from nsa_tune.reports.compare.judging import Judged, Verdict, percent
from nsa_tune.reports.output.grids import Grid

__all__ = ["SCHEMA", "conclusion", "document", "grids", "title"]

SCHEMA = "nsa-tune/compare/1"
_MOST = 15


def title(comparison: Comparison) -> str:
    """What is compared with what."""
    key = comparison.after.key
    setting = f"{key.model}, {key.heads} local heads, {key.kv_layout}"
    return f"{setting}: {comparison.after.source} against {comparison.before.source}"


def conclusion(comparisons: Sequence[Comparison], fail_on: float | None) -> str:
    """One line: how many cells are what, and whether that is a regression."""
    counts = {verdict: sum(one.counts[verdict] for one in comparisons) for verdict in Verdict}
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    total = sum(counts.values()) - counts[Verdict.ONLY_BEFORE] - counts[Verdict.ONLY_AFTER]
    if not total:
        return "no cell was measured on both sides"
    same = f"{total} cells: {words} ({counts[Verdict.SAME] / total:.1%} same)"
    if fail_on is None:
        return same
    worse = sum(len(one.regressions(fail_on)) for one in comparisons)
    found = f"{worse} regressions of" if worse > 1 else "1 regression of" if worse else "none by"
    return f"{same}; {found} more than {percent(fail_on)}"


def grids(comparison: Comparison, *, every: bool) -> Iterator[Grid]:
    """The tables of a comparison in reading order; empty ones are left out.

    Without `every` only the cells that moved most are listed, and no same ones.
    """
    every_grid = [
        _fingerprint(comparison),
        _arms(comparison),
        _shifts(comparison),
        _crossings(comparison),
        _winners(comparison),
        _cells(comparison, every=every),
    ]
    return (grid for grid in every_grid if grid.rows)


def _fingerprint(comparison: Comparison) -> Grid:
    rows = tuple((one.field, one.before, one.after) for one in comparison.differences)
    equal = comparison.before.key == comparison.after.key
    note = "GPU, driver, versions and setting are the same." if equal else ""
    return Grid("What differs", ("field", "before", "after"), rows, note=note)


def _arms(comparison: Comparison) -> Grid:
    verdicts = list(Verdict)
    rows = [
        (one.point, one.arm, "-" if one.geomean is None else f"{one.geomean:.3f}x",
         *(str(one.counts.get(verdict, 0)) for verdict in verdicts))
        for one in comparison.arms
    ]  # fmt: skip
    columns = ("point", "arm", "mean", *map(str, verdicts))
    return Grid(
        "Arms", columns, tuple(rows), frozenset(range(2, len(columns))),
        note="mean: geometric mean of the time after over the time before; below 1 is faster.",
    )  # fmt: skip


def _shifts(comparison: Comparison) -> Grid:
    rows = [
        (one.answer, f"{one.left} to {one.right}", str(one.count), f"{one.mean:.2f}x",
         f"{one.low:.2f}-{one.high:.2f}x" if one.count > 2 else "-")
        for one in comparison.shifts
    ]  # fmt: skip
    return Grid(
        "Where choices cross, on average", ("question", "change", "lines", "after/before", "95 %"),
        tuple(rows), frozenset({2, 3, 4}),
        note="Below 1: the second choice begins to win at smaller batches.",
    )  # fmt: skip


def _crossings(comparison: Comparison) -> Grid:
    rows = [
        (one.answer, one.where, one.before, one.after, "-" if one.by is None else f"{one.by:.2f}x")
        for one in comparison.moved
    ]
    return Grid(
        "Crossovers that moved", ("question", "line", "before", "after", "by"), tuple(rows),
        frozenset({4}),
    )  # fmt: skip


def _winners(comparison: Comparison) -> Grid:
    rows = [(one.answer, one.batch, one.before, one.after) for one in comparison.winners]
    extra = f"And {len(rows) - _MOST} more." if len(rows) > _MOST else ""
    return Grid(
        "Batches with another winner", ("question", "batch", "before", "after"),
        tuple(rows[:_MOST]), note=extra,
    )  # fmt: skip


_ORDER = (
    Verdict.BROKEN, Verdict.SLOWER, Verdict.FASTER, Verdict.UNCLEAR, Verdict.MENDED,
    Verdict.ONLY_BEFORE, Verdict.ONLY_AFTER, Verdict.SAME,
)  # fmt: skip


def _cells(comparison: Comparison, *, every: bool) -> Grid:
    def rank(cell: Judged) -> tuple[int, float]:
        ratio = cell.ratio or 1.0
        return _ORDER.index(cell.verdict), -max(ratio, 1 / ratio)

    shown = [cell for cell in comparison.cells if every or cell.verdict is not Verdict.SAME]
    shown.sort(key=rank)
    rest = 0 if every else max(len(shown) - _MOST, 0)
    rows = tuple(
        (str(cell.verdict), cell.arm, cell.batch, _us(cell.before_us), _us(cell.after_us),
         cell.reason)
        for cell in (shown if every else shown[:_MOST])
    )  # fmt: skip
    return Grid(
        "Cells" if every else "Cells that are not the same",
        ("verdict", "arm", "batch", "before us", "after us", "reason"),
        rows,
        frozenset({3, 4}),
        note=f"And {rest} more: --all lists every cell." if rest else "",
    )


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def document(comparisons: Sequence[Comparison], fail_on: float | None) -> dict[str, Any]:
    """All comparisons as values that JSON can hold."""
    limit = 0.0 if fail_on is None else fail_on
    regressions = [words for one in comparisons for words in one.regressions(limit)]
    return {
        "schema": SCHEMA,
        "conclusion": conclusion(comparisons, fail_on),
        "fail_on": fail_on,
        "regressions": regressions if fail_on is not None else [],
        "comparisons": [_document(one) for one in comparisons],
    }


def _document(comparison: Comparison) -> dict[str, Any]:
    return {
        "before": _side(comparison, "before"),
        "after": _side(comparison, "after"),
        "differences": [asdict(one) for one in comparison.differences],
        "counts": {str(verdict): comparison.counts[verdict] for verdict in Verdict},
        "arms": [
            {**asdict(one), "counts": {str(verdict): n for verdict, n in one.counts.items()}}
            for one in comparison.arms
        ],
        "shifts": [
            {**asdict(one), **({} if one.count > 2 else {"low": None, "high": None})}
            for one in comparison.shifts
        ],
        "moved_crossovers": [asdict(one) for one in comparison.moved],
        "other_winners": [asdict(one) for one in comparison.winners],
        "cells": [{**asdict(cell), "verdict": str(cell.verdict)} for cell in comparison.cells],
    }


def _side(comparison: Comparison, side: str) -> dict[str, Any]:
    table = comparison.before if side == "before" else comparison.after
    return {
        "source": table.source,
        "digest": table.key.digest,
        "key": {**asdict(table.key), "libraries": dict(table.key.libraries)},
        "measured_at": table.measured_at,
        "measurements": len(table.measurements),
    }
