"""Least squares with weights that are not negative."""

from __future__ import annotations

from math import hypot
from operator import mul

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nsa_tune.backend.costmodel.least_squares import _products, nonnegative_weights

_WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=3, max_size=3)


def _squares(rows: list[tuple[float, ...]], weights: tuple[float, ...]) -> float:
    return sum((sum(w * x for w, x in zip(weights, row, strict=True)) - 1) ** 2 for row in rows)


@given(_WEIGHTS)
@settings(max_examples=50)
def test_weights_that_made_the_rows_are_found(true: list[float]) -> None:
    terms = [(1.0, 1.0, 1.0), (4.0, 1.0, 1.0), (1.0, 7.0, 1.0), (9.0, 2.0, 1.0), (2.0, 30.0, 1.0)]
    times = [sum(w * x for w, x in zip(true, row, strict=True)) for row in terms]
    rows = [tuple(x / time for x in row) for row, time in zip(terms, times, strict=True)]

    assert nonnegative_weights(rows) == pytest.approx(true, rel=1e-3)


def test_a_weight_that_would_be_negative_is_zero() -> None:
    # 3 x - 1 at x = 1 and 2, relative: the best without a negative constant has none.
    rows = [(1 / 2, 1 / 2), (2 / 5, 1 / 5)]

    weights = nonnegative_weights(rows)

    assert weights[1] == 0
    assert weights[0] == pytest.approx((1 / 2 + 2 / 5) / (1 / 4 + 4 / 25))


# The weight of a column of subnormal numbers would be infinite; no feature is as small.
@given(
    st.lists(st.tuples(*[st.floats(0.0, 10.0, allow_subnormal=False)] * 3), min_size=1, max_size=12)
)
@example([(10.0, 0.0, 1.0), (1.5, 1e-160, 10.0)])
@settings(max_examples=100)
def test_no_step_along_an_axis_is_better(rows: list[tuple[float, ...]]) -> None:
    weights = nonnegative_weights(rows)
    least = _squares(rows, weights)

    assert min(weights) >= 0
    for j in range(3):
        for step in (0.9, 1.1):
            moved = (*weights[:j], weights[j] * step + (step > 1) * 1e-3, *weights[j + 1 :])
            assert _squares(rows, moved) >= least - 1e-6


def test_equal_columns_share_and_empty_ones_get_nothing() -> None:
    rows = [(2 / t, 2 / t, 0.0, 1 / t) for t in (5.0,)] + [
        (6 / t, 6 / t, 0.0, 1 / t) for t in (13.0,)
    ]

    weights = nonnegative_weights(rows)

    assert weights[0] + weights[1] == pytest.approx(2, rel=1e-3)
    assert weights[2] == 0


def test_the_products_of_columns_are_theirs() -> None:
    columns = [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [5.0, -1.0, 0.5], [1e9, 2e9, 3e9]]
    scaled = [tuple(x / (hypot(*column) or 1.0) for x in column) for column in columns]
    gram = _products(scaled)

    for i, one in enumerate(scaled):
        for j, other in enumerate(scaled):
            assert i == j or gram[i][j] == pytest.approx(sum(map(mul, one, other)), abs=1e-12)
