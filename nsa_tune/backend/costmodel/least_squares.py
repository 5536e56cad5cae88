"""Least squares with weights that are not negative, for a handful of columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import dist, hypot
from operator import mul


def nonnegative_weights(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The w >= 0 that minimises the sum over `rows` of (row . w - 1)**2."""
    return fitted_weights(list(zip(*rows, strict=True)), [1.0] * len(rows))


def fitted_weights(
    columns: Sequence[Sequence[float]], targets: Sequence[float]
) -> tuple[float, ...]:
    """The w >= 0, one a column, that minimises the squared error of their sum to `targets`."""
    norms = [hypot(*column) or 1.0 for column in columns]
    scaled = [
        tuple([x / norm for x in column]) for column, norm in zip(columns, norms, strict=True)
    ]
    right = [sum(map(mul, column, targets)) for column in scaled]
    weights = _best(_products(scaled), right, 1e-9 * sum(map(mul, targets, targets)))
    return tuple(weight / norm for weight, norm in zip(weights, norms, strict=True))


_RIDGE = 1e-9


def _products(scaled: Sequence[tuple[float, ...]]) -> list[list[float]]:
    """The Gram matrix of columns of length 1."""
    # Two terms may be the same number on a whole regime: the ridge keeps it regular.
    size = len(scaled)
    gram = [[1.0 + _RIDGE if i == j else 0.0 for j in range(size)] for i in range(size)]
    for i, j in combinations([i for i, column in enumerate(scaled) if any(column)], 2):
        # The product of vectors of length 1, by a function that runs in C.
        gram[i][j] = gram[j][i] = 1.0 - dist(scaled[i], scaled[j]) ** 2 / 2
    return gram


def _best(gram: list[list[float]], right: list[float], least: float) -> list[float]:
    """The best weights, by Lawson and Hanson's active set on the normal equations."""
    weights = [0.0] * len(right)
    free: list[int] = []
    for _ in range(3 * len(right)):
        slopes = {
            j: right[j] - sum(map(mul, gram[j], weights))
            for j in range(len(right))
            if j not in free
        }
        steepest = max(slopes, key=slopes.__getitem__, default=None)
        if steepest is None or slopes[steepest] <= least:
            break
        free = _settled(gram, right, weights, [*free, steepest])
    return weights


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
        solved = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - solved) / rows[i][i]
    return solution
