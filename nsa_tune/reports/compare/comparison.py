"""Comparison of two tables of one model, head count and KV layout: cells and winners."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import geometric_mean

from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Table
from nsa_tune.reports.analysis.cells import Cell
from nsa_tune.reports.analysis.report import measured_cells
from nsa_tune.reports.compare.cell_verdicts import (
    CellVerdict,
    JudgedCell,
    judge,
    one_sided,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of key or device in which the tables differ."""

    field: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """The cells of one arm, summed up."""

    point: str
    arm: str
    counts: Mapping[CellVerdict, int]
    geomean: float | None
    """Geometric mean of time after over time before; None if no cell succeeded on both sides."""


@dataclass(frozen=True, slots=True)
class Winner:
    """A batch on which the sides are sure of different choices."""

    question: str
    batch: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed from table `before` to table `after`."""

    before: Table
    after: Table
    differences: tuple[Difference, ...]
    arms: tuple[ArmSummary, ...]
    cells: tuple[JudgedCell, ...]
    winners: tuple[Winner, ...]

    @property
    def counts(self) -> Counter[CellVerdict]:
        """How many cells have each verdict."""
        return Counter(cell.verdict for cell in self.cells)

    def regressions(self, limit: float) -> list[str]:
        """Arms and cells that are slower by more than `limit` (0.05 is 5 %), and broken cells.

        A cell counts by the lower end of its interval; an arm by the mean over its cells, which is
        far more certain.
        """
        cells = [
            f"{cell.arm} on {cell.batch} {cell.verdict}: {cell.reason}"
            for cell in self.cells
            if cell.verdict is CellVerdict.BROKEN
            or (cell.verdict is CellVerdict.SLOWER and (cell.low or 0) > 1 + limit)
        ]
        arms = [
            f"{arm.arm} takes {arm.geomean:.3f}x as long, in the mean of its cells"
            for arm in self.arms
            if arm.geomean is not None and arm.geomean > 1 + limit
        ]
        return arms + cells


def compare(before: Table, after: Table, *, points: Mapping[str, Point] = POINTS) -> Comparison:
    """What changed from `before` to `after`, two tables of one model, head count and KV layout.

    Raises:
        StoreCorrupt: when a table cannot be read as one of its points.
    """
    settings = Setting.of(before), Setting.of(after)
    # As plans compare arms: with a layer's share of what is computed once a pass.
    ours, theirs = (
        {
            (row.point, row.batch, row.arm): row.amortised(setting.sharing)
            for row in table.measurements
        }
        for table, setting in zip((before, after), settings, strict=True)
    )
    cells = judge(ours, theirs, points, settings[0], one_gpu=before.key.gpu == after.key.gpu)
    cells += one_sided(ours, theirs, points, *settings)
    sides = (measured_cells(table, points) for table in (before, after))
    return Comparison(
        before=before,
        after=after,
        differences=tuple(_differences(before, after)),
        arms=tuple(_summaries(cells)),
        cells=tuple(cells),
        winners=tuple(_winners(*sides)),
    )


def _winners(before: Mapping[str, list[Cell]], after: Mapping[str, list[Cell]]) -> Iterator[Winner]:
    """The measured batches on which both sides are sure of their winners, and these differ."""
    for question, cells in before.items():
        others = {cell.word: cell for cell in after.get(question, ())}
        for cell in cells:
            other = others.get(cell.word)
            if other is None or cell.choice == other.choice:
                continue
            if cell.is_sure and other.is_sure:
                yield Winner(question, cell.word, cell.choice or "", other.choice or "")


def _differences(before: Table, after: Table) -> Iterator[Difference]:
    for name, ours, theirs in before.key.differences(after.key):
        yield Difference(name, ours, theirs)
    devices = asdict(before.device), asdict(after.device)
    for name, value in devices[0].items():
        # The device's name is the key's GPU.
        if name != "name" and value != devices[1][name]:
            yield Difference(name, str(value), str(devices[1][name]))
    if before.measured_at != after.measured_at:
        yield Difference("measured_at", before.measured_at, after.measured_at)


def _summaries(cells: Iterable[JudgedCell]) -> Iterator[ArmSummary]:
    judged: dict[tuple[str, str], list[JudgedCell]] = defaultdict(list)
    for cell in cells:
        judged[cell.point, cell.arm].append(cell)
    for (point, arm), group in sorted(judged.items()):
        ratios = [cell.ratio for cell in group if cell.ratio is not None]
        counts = Counter(cell.verdict for cell in group)
        yield ArmSummary(point, arm, counts, geometric_mean(ratios) if ratios else None)
