"""What the engine's own rule costs against the best measured choice, and what the table's does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa_tune.reports.content.cells import Cell

__all__ = ["Cost", "cost_of_choice", "cost_of_default", "worst_first"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Ratios to the best measured choice over the batches that have one; 1 costs nothing."""

    batches: int
    geomean: float
    worst: float
    worst_batch: str
    unmeasured: int
    """Batches for which the chosen one has no time."""


def cost_of_default(cells: Sequence[Cell]) -> Cost | None:
    """The cost of the engine's rule over `cells`; None when no cell has a time for it."""
    return _cost([(cell, cell.cost(cell.default)) for cell in cells])


def cost_of_choice(cells: Sequence[Cell]) -> Cost | None:
    """The cost of what the table's policy answers on the batches that it was made from."""
    return _cost([(cell, cell.cost(cell.choice)) for cell in cells])


def worst_first(cells: Sequence[Cell], *, free_too: bool = False) -> list[tuple[Cell, float]]:
    """(cell, cost of the engine's rule), the worst first; `free_too` those where it is the best."""
    costs = [(cell, cost) for cell in cells if (cost := cell.cost(cell.default)) is not None]
    costly = [(cell, cost) for cell, cost in costs if free_too or cost > 1]
    return sorted(costly, key=lambda pair: (-pair[1], pair[0].word))


def _cost(pairs: list[tuple[Cell, float | None]]) -> Cost | None:
    known = [(cost, cell.word) for cell, cost in pairs if cost is not None]
    if not known:
        return None
    worst, batch = max(known)
    geomean = exp(fsum(log(cost) for cost, _ in known) / len(known))
    return Cost(len(known), geomean, worst, batch, len(pairs) - len(known))
