"""Counts in sentences."""

from __future__ import annotations

import pytest

from nsa_tune.backend.types.counted import counted


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((0, "table"), "0 tables"),
        ((1, "table"), "1 table"),
        ((2, "table"), "2 tables"),
        ((1, "batch", "batches"), "1 batch"),
        ((2, "batch", "batches"), "2 batches"),
    ],
)
def test_one_is_singular_and_everything_else_plural(words: tuple[int, str], text: str) -> None:
    assert counted(*words) == text
