"""Lengths added and multiplied all at once are what one by one gives."""

from __future__ import annotations

from operator import add

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.types.lengths import MAX_TOKENS, lanes, number_of, pairs_of

_LENGTH = st.one_of(st.integers(0, 9), st.integers(0, 300_000), st.integers(0, 2**24))


@given(st.lists(st.tuples(_LENGTH, _LENGTH), min_size=1, max_size=70))
def test_lanes_add_each_pair_and_tell_zeros(lens: list[tuple[int, int]]) -> None:
    ones, others = [one for one, _ in lens], [other for _, other in lens]
    pack, unpack, size, fill, top = lanes(len(lens))
    one, other = number_of(pack(*ones), "little"), number_of(pack(*others), "little")

    assert unpack((one + other).to_bytes(size, "little")) == tuple(map(add, ones, others))
    assert ((other + fill) & top == top) == all(others)


def test_lanes_hold_the_largest_length() -> None:
    pack, unpack, size, fill, top = lanes(3)
    one, other = (number_of(pack(*some), "little") for some in ((0, MAX_TOKENS, 0), (1, 0, 2)))

    assert unpack((one + other).to_bytes(size, "little")) == (1, MAX_TOKENS, 2)
    assert (one + fill) & top != top


@given(st.lists(st.tuples(_LENGTH, _LENGTH.filter(bool)), min_size=1, max_size=70))
def test_pairs_are_counted_exactly(lens: list[tuple[int, int]]) -> None:
    prefixes, news = [prefix for prefix, _ in lens], [new for _, new in lens]
    exactly = sum(new * prefix + new * (new + 1) // 2 for prefix, new in lens)

    assert pairs_of(prefixes, list(map(add, prefixes, news)), sum(news)) == exactly


@pytest.mark.parametrize("prefix", [2**24 - 2, 2**24 - 1, 2**24, MAX_TOKENS - 1])
def test_pairs_of_lengths_past_exact_squares_are_exact_too(prefix: int) -> None:
    assert pairs_of([prefix], [prefix + 1], 1) == prefix + 1
