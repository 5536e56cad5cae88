"""Extend batches from an engine's lists and arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch
from nsa_tune.backend.engines.extends import batch_of, sums_of, sums_of_arrays, sums_of_kv

LENS = st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 9000)), min_size=1, max_size=70)


@given(LENS)
def test_sums_are_those_of_the_lengths(lens: list[tuple[int, int]]) -> None:
    prefixes, news = [list(one) for one in zip(*lens, strict=True)]
    kv_lens = [prefix + new for prefix, new in lens]
    found = sums_of_kv(kv_lens, news, sum(news))

    assert sums_of_arrays(np.array(kv_lens), np.array(news), sum(news)) == found
    if 0 in news:
        assert found is None
        return
    batch = Batch.extend(prefixes, news)

    assert batch_of(prefixes, news) == batch
    assert found == sums_of(prefixes, news) == batch.sums


def test_lists_of_other_lengths_are_no_batch() -> None:
    assert sums_of_kv([5, 6], [1], 1) is sums_of([5, 6], [1]) is None
    assert sums_of_arrays(np.array([5, 6]), np.array([1]), 1) is None


def test_no_sequence_is_no_batch() -> None:
    assert sums_of_kv([], [], 0) is None
