"""Least squares with weights that are not negative, for a handful of columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import hypot
from operator import mul

__all__ = ["nonnegative_weights"]


def nonnegative_weights(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The w >= 0 that minimises the sum over `rows` of (row . w - 1)**2.

    Lawson and Hanson's active set on the normal equations: a handful of columns.
    """
    width = len(rows[0])
    norms = [hypot(*(row[j] for row in rows)) or 1.0 for j in range(width)]
    scaled = [[row[j] / norms[j] for j in range(width)] for row in rows]
    right = [sum(row[j] for row in scaled) for j in range(width)]
    gram = [[0.0] * width for _ in range(width)]
    for i, j in product(range(width), repeat=2):
        # Two terms may be the same number on a whole sheet: the ridge keeps the system regular.
        gram[i][j] = sum(row[i] * row[j] for row in scaled) + (1e-9 if i == j else 0.0)
    weights = [0.0] * width
    free: list[int] = []
    for _ in range(3 * width):
        slopes = {
            j: right[j] - sum(map(mul, gram[j], weights)) for j in range(width) if j not in free
        }
        steepest = max(slopes, key=slopes.__getitem__, default=None)
        if steepest is None or slopes[steepest] <= 1e-9 * len(rows):
            break
        free = _settled(gram, right, weights, [*free, steepest])
    return tuple(weight / norm for weight, norm in zip(weights, norms, strict=True))


def _settled(
    gram: list[list[float]], right: list[float], weights: list[float], free: list[int]
) -> list[int]:
    """Solve for the `free` weights in place, dropping those that would become negative."""
    while free:
        best = _solved([[gram[i][j] for j in free] for i in free], [right[i] for i in free])
        blocked = [weights[i] / (weights[i] - x) for i, x in zip(free, best, strict=True) if x < 0]
        step = min(blocked, default=1.0)
        for i, x in zip(free, best, strict=True):
            weights[i] += step * (x - weights[i])
        if not blocked:
            break
        for i in free:
            weights[i] = weights[i] if weights[i] > 1e-15 else 0.0
        free = [i for i in free if weights[i] > 0]
    return free


def _solved(matrix: list[list[float]], right: Iterable[float]) -> list[float]:
    """x with matrix x = right, by elimination; the matrix is symmetric and positive definite."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
