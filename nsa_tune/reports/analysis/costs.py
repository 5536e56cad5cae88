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


def cost_of(taken: Sequence[tuple[Cell, str | None]]) -> Cost | None:
    """The cost of the choice that is taken for each cell; None when none of them has a time."""
    costs = [(cell.cost(choice), cell.word) for cell, choice in taken]
    known = [(cost, word) for cost, word in costs if cost is not None]
    if not known:
        return None
    worst, batch = max(known)
    geomean = geometric_mean(cost for cost, _ in known)
    return Cost(len(known), geomean, worst, batch, len(costs) - len(known))


def worst_first(cells: Sequence[Cell]) -> list[tuple[Cell, float]]:
    """(cell, cost of the baseline), worst first, where it costs something."""
    costs = [(cell, cost) for cell in cells if (cost := cell.cost(cell.default)) is not None]
    costly = [(cell, cost) for cell, cost in costs if cost > 1]
    return sorted(costly, key=lambda pair: (-pair[1], pair[0].word))
