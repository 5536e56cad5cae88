"""Pairs of queries and keys, counted from lengths."""

from __future__ import annotations

from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.types.lengths import MAX_TOKENS, pairs_of

_LENGTH = st.one_of(st.integers(0, 9), st.integers(0, 300_000), st.integers(0, 2**24))


@given(st.lists(st.tuples(_LENGTH, _LENGTH.filter(bool)), min_size=1, max_size=70))
def test_pairs_are_counted_exactly(lens: list[tuple[int, int]]) -> None:
    prefixes, news = [prefix for prefix, _ in lens], [new for _, new in lens]
    exactly = sum(new * prefix + new * (new + 1) // 2 for prefix, new in lens)

    kv_lens = list(map(add, prefixes, news))
    assert pairs_of(prefixes, kv_lens, sum(news)) == exactly


@pytest.mark.parametrize("prefix", [2**24 - 2, 2**24 - 1, 2**24, MAX_TOKENS - 1])
def test_pairs_of_lengths_past_exact_squares_are_exact_too(prefix: int) -> None:
    assert pairs_of([prefix], [prefix + 1], 1) == prefix + 1
