"""Comparison: two tables of one setting, cell by cell, crossover by crossover."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import exp, fsum, log

from nsa_tune.backend.baselines import SGLANG_0_5_23, Rule
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.point import Point
from nsa_tune.backend.types.records import Table
from nsa_tune.reports.compare.crossings import (
    Moved,
    Shift,
    Winner,
    moved_crossovers,
    other_winners,
    shifts,
)
from nsa_tune.reports.compare.judging import SAME_WITHIN, Judged, Verdict, judge
from nsa_tune.reports.compare.one_sided import one_sided
from nsa_tune.reports.content.report import build, setting_of

__all__ = ["ArmSummary", "Comparison", "Difference", "compare"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of the fingerprint."""

    field: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """All cells of one arm."""

    point: str
    arm: str
    counts: Mapping[Verdict, int]
    geomean: float | None
    """Of the second side's times over the first's; None when no cell succeeded on both."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two tables against each other; the second is told by the first."""

    before: Table
    after: Table
    differences: tuple[Difference, ...]
    arms: tuple[ArmSummary, ...]
    cells: tuple[Judged, ...]
    shifts: tuple[Shift, ...]
    moved: tuple[Moved, ...]
    winners: tuple[Winner, ...]

    @property
    def counts(self) -> Counter[Verdict]:
        """How many cells have each verdict."""
        return Counter(cell.verdict for cell in self.cells)

    def regressions(self, limit: float) -> list[str]:
        """What is surely slower by more than `limit` (0.05 is 5 %), or broken: cells, by the low
        end of their interval, and arms, by their mean over all cells, which is far surer."""
        cells = [
            f"{cell.arm} on {cell.batch} {cell.verdict}: {cell.reason}"
            for cell in self.cells
            if cell.verdict is Verdict.BROKEN
            or (cell.verdict is Verdict.SLOWER and (cell.low or 0) > 1 + limit)
        ]
        arms = [
            f"{arm.arm} takes {arm.geomean:.3f}x in the mean of its cells"
            for arm in self.arms
            if arm.geomean is not None and arm.geomean > 1 + limit
        ]
        return arms + cells


def compare(
    before: Table,
    after: Table,
    *,
    same_within: float = SAME_WITHIN,
    points: Mapping[str, Point] = POINTS,
    rule: Rule = SGLANG_0_5_23,
) -> Comparison:
    """`after` as against `before`, two tables of one model, head count and KV layout.

    Raises:
        StoreCorrupt: when a table cannot be read as one of its points.
    """
    ours, theirs = (
        {(row.point, row.batch, row.arm): row for row in table.measurements}
        for table in (before, after)
    )
    settings = setting_of(before), setting_of(after)
    cells = judge(
        ours, theirs, points, settings[0], same_within, one_gpu=before.key.gpu == after.key.gpu
    )
    cells += one_sided(ours, theirs, points, *settings)
    one, other = build([before, after], points=points, rule=rule).sections
    return Comparison(
        before=before,
        after=after,
        differences=tuple(_differences(before, after)),
        arms=tuple(_summaries(cells)),
        cells=tuple(cells),
        shifts=tuple(shifts(one, other)),
        moved=tuple(moved_crossovers(one, other)),
        winners=tuple(other_winners(one, other)),
    )


def _differences(before: Table, after: Table) -> Iterator[Difference]:
    for name, ours, theirs in before.key.differences(after.key):
        yield Difference(name, ours, theirs)
    one, other = asdict(before.device), asdict(after.device)
    for name, value in one.items():
        # The device's name is the key's GPU.
        if name != "name" and value != other[name]:
            yield Difference(name, str(value), str(other[name]))
    if before.measured_at != after.measured_at:
        yield Difference("measured_at", before.measured_at, after.measured_at)


def _summaries(cells: Iterable[Judged]) -> Iterator[ArmSummary]:
    judged: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for cell in cells:
        judged[cell.point, cell.arm].append(cell)
    for (point, arm), own in sorted(judged.items()):
        logs = [log(cell.ratio) for cell in own if cell.ratio is not None]
        counts = Counter(cell.verdict for cell in own)
        yield ArmSummary(point, arm, counts, exp(fsum(logs) / len(logs)) if logs else None)
