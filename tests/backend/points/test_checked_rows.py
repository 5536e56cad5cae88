"""Rows that are compared with a reference: the ends of all short batches, and nothing outside."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.points.checked_rows import checked_rows, worst_error


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(0, 9))
def test_rows_are_of_the_batch_and_hold_its_ends(news: list[int], seed: int) -> None:
    starts = [0, *accumulate(news)]

    rows = checked_rows(torch.tensor(starts), seed).tolist()

    assert rows == sorted(set(rows))
    assert {0, starts[-1] - 1} <= set(rows)
    assert max(rows) < starts[-1]
    if len(news) <= 4:
        assert set(starts[:-1]) | {end - 1 for end in starts[1:]} <= set(rows)


def test_the_worst_row_counts() -> None:
    output = torch.ones(6, 2, 4)
    rows = torch.tensor([1, 4])
    reference = torch.ones(2, 2, 4)
    output[4] *= 1.5
    output[5] = 9.0

    assert worst_error(output, rows, reference) == pytest.approx(0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_output_that_is_not_finite_anywhere_is_infinitely_wrong(value: float) -> None:
    output = torch.ones(6, 2, 4)
    output[3, 0, 0] = value

    assert worst_error(output, torch.tensor([0]), torch.ones(1, 2, 4)) == float("inf")
