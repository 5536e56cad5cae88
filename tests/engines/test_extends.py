"""Extend batches from an engine's lists."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsa_tune import Batch
from nsa_tune._errors import BatchError
from nsa_tune.backend.points.schedules import attended_pairs
from nsa_tune.engines.extends import batch_of, selecting, sums_of

MOST = 2**31 - 1
LENS = st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 9000)), min_size=1, max_size=70)


@given(LENS)
def test_sums_are_those_of_the_lengths(lens: list[tuple[int, int]]) -> None:
    prefixes, news = [list(column) for column in zip(*lens, strict=True)]
    batch = Batch.extend(prefixes, news)

    assert batch_of(prefixes, news) == batch
    assert sums_of(prefixes, news) == batch.sums


@given(LENS, st.integers(0, 3))
def test_keys_that_are_selected_are_counted_without_keeping_lengths(
    lens: list[tuple[int, int]], padding: int
) -> None:
    """What is asked for takes no longer however many sequences a pass has."""
    prefixes, news = [list(column) for column in zip(*lens, strict=True)]
    batch, padded = Batch.extend(prefixes, news), [0] * padding
    asked = selecting(batch.sums, prefixes + padded, news + padded, 2048)

    assert asked.kv_lens is None
    assert attended_pairs(asked, 2048) == attended_pairs(batch, 2048)


def test_lists_of_other_lengths_are_no_batch() -> None:
    assert sums_of([5, 6], [1]) is None


def test_no_sequence_is_no_batch() -> None:
    assert sums_of([], []) is None


@given(st.lists(st.tuples(st.integers(0, MOST), st.integers(1, MOST)), min_size=1, max_size=5))
@example([(2**30 - 1, 1), (2**30 - 3, 2)])
@example([(0, 2**30), (0, 2**30 - 1)])
@example([(2**31 - 2**23, 2**21), (3, 2**21 + 1)])
def test_no_pair_is_lost_of_lengths_of_31_bits(lens: list[tuple[int, int]]) -> None:
    """A dense batch may have 2**61 pairs, more than floating point numbers tell apart."""
    prefixes, news = [list(column) for column in zip(*lens, strict=True)]
    kv_lens = [prefix + new for prefix, new in lens]
    if sum(kv_lens) > MOST:
        with pytest.raises(BatchError, match="kv_tokens < 2"):
            sums_of(prefixes, news)
        return

    batch = sums_of(prefixes, news)

    assert batch is not None
    assert [batch.batch_size, batch.q_tokens, batch.kv_tokens, batch.max_kv, batch.pairs] == [
        len(lens), sum(news), sum(kv_lens), max(kv_lens),
        sum(prefix * new + new * (new + 1) // 2 for prefix, new in lens),
    ]  # fmt: skip
