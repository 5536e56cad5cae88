"""Extend batches from an engine's lists and arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsa_tune import Batch
from nsa_tune._errors import BatchError
from nsa_tune.engines.extends import batch_of, sums_of, sums_of_arrays, sums_of_kv

MOST = 2**31 - 1
LENS = st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 9000)), min_size=1, max_size=70)


def _array(lens: list[int]) -> Any:
    return np.array(lens, dtype=np.int32).astype(np.float64)


@given(LENS)
def test_sums_are_those_of_the_lengths(lens: list[tuple[int, int]]) -> None:
    prefixes, news = [list(one) for one in zip(*lens, strict=True)]
    kv_lens = [prefix + new for prefix, new in lens]
    found = sums_of_kv(kv_lens, news, sum(news))

    assert sums_of_arrays(_array(kv_lens), _array(news), sum(news)) == found
    if 0 in news:
        assert found is None
        return
    batch = Batch.extend(prefixes, news)

    assert batch_of(prefixes, news) == batch
    assert found == sums_of(prefixes, news) == batch.sums


def test_lists_of_other_lengths_are_no_batch() -> None:
    assert sums_of_kv([5, 6], [1], 1) is sums_of([5, 6], [1]) is None
    assert sums_of_arrays(_array([5, 6]), _array([1]), 1) is None


def test_no_sequence_is_no_batch() -> None:
    assert sums_of_kv([], [], 0) is None


@given(st.lists(st.tuples(st.integers(0, MOST), st.integers(1, MOST)), min_size=1, max_size=5))
@example([(2**30 - 1, 1), (2**30 - 3, 2)])
@example([(0, 2**30), (0, 2**30 - 1)])
@example([(2**31 - 2**23, 2**21), (3, 2**21 + 1)])
def test_no_pair_is_lost_of_lengths_of_31_bits(lens: list[tuple[int, int]]) -> None:
    """A dense batch may have 2**61 pairs, more than floating point numbers tell apart."""
    prefixes, news = [list(one) for one in zip(*lens, strict=True)]
    kv_lens = [prefix + new for prefix, new in lens]
    expected = [
        len(lens), sum(news), sum(kv_lens), max(kv_lens),
        sum(prefix * new + new * (new + 1) // 2 for prefix, new in lens),
    ]  # fmt: skip
    asked: list[Callable[[], Batch | None]] = [
        lambda: sums_of(prefixes, news),
        lambda: sums_of_kv(kv_lens, news, sum(news)),
    ]
    if max(kv_lens) <= MOST:
        asked.append(lambda: sums_of_arrays(_array(kv_lens), _array(news), sum(news)))
    for ask in asked:
        if sum(kv_lens) > MOST:
            with pytest.raises(BatchError, match="kv_tokens < 2"):
                ask()
        else:
            assert _sums(ask()) == expected


@given(st.lists(st.tuples(st.integers(-MOST, MOST), st.integers(-3, 9)), min_size=2, max_size=60))
def test_lengths_that_cannot_be_are_refused_alike(lens: list[tuple[int, int]]) -> None:
    """However the sums are made: None, or an error, or a batch of the same sums."""
    kv_lens, news = [list(one) for one in zip(*lens, strict=True)]
    if min(news) < 1:
        assert sums_of_arrays(_array(kv_lens), _array(news), sum(news)) is None
        return
    by_lists = _said(lambda: sums_of_kv(kv_lens, news, sum(news)))
    by_arrays = _said(lambda: sums_of_arrays(_array(kv_lens), _array(news), sum(news)))
    assert by_lists == by_arrays


def _said(ask: Callable[[], Batch | None]) -> list[int] | str:
    try:
        return _sums(ask())
    except BatchError as error:
        return str(error)


def _sums(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [batch.batch_size, batch.q_tokens, batch.kv_tokens, batch.max_kv, batch.pairs]
