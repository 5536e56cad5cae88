"""What the engine's baseline, and the table itself, cost over the best measured choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from nsa_tune.reports.analysis.cells import Cell


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of the taken choices over that of the best measured ones; 1 is no cost."""

    batches: int
    geomean: float
    worst: float
    worst_batch: str
    unmeasured: int
    """Batches left out because the taken choice has no measured time."""


def cost_of_default(cells: Sequence[Cell]) -> Cost | None:
    """The cost of the engine's baseline over `cells`; None when no cell has a time for it."""
    return _cost([(cell, cell.cost(cell.default)) for cell in cells])


def cost_of_choice(cells: Sequence[Cell]) -> Cost | None:
    """The cost of the table's own choices, on the batches that the table was made from."""
    return _cost([(cell, cell.cost(cell.choice)) for cell in cells])


def worst_first(cells: Sequence[Cell]) -> list[tuple[Cell, float]]:
    """(cell, cost of the baseline), worst first, where it costs something."""
    costs = [(cell, cost) for cell in cells if (cost := cell.cost(cell.default)) is not None]
    costly = [(cell, cost) for cell, cost in costs if cost > 1]
    return sorted(costly, key=lambda pair: (-pair[1], pair[0].word))


def _cost(pairs: list[tuple[Cell, float | None]]) -> Cost | None:
    known = [(cost, cell.word) for cell, cost in pairs if cost is not None]
    if not known:
        return None
    worst, batch = max(known)
    geomean = geometric_mean(cost for cost, _ in known)
    return Cost(len(known), geomean, worst, batch, len(pairs) - len(known))
