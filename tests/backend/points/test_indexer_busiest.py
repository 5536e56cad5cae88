"""Which keys DeepGEMM's ragged logits cost: as if its blocks were dealt to the SMs one by one."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.points.indexer_prefill.busiest import keys_of_the_busiest

Sequences = list[tuple[int, int, int]]
WHOLE = 10**9
"""Rows a chunk, where all are in one."""


class Row(NamedTuple):
    sequence: int
    first: int
    """Of the keys that it sees, among those of all sequences."""
    end: int


def rows_of(sequences: Sequences) -> list[Row]:
    alone = [(prefix, new) for prefix, new, count in sequences for _ in range(count)]
    rows, first = [], 0
    for number, (prefix, new) in enumerate(alone):
        rows += [Row(number, first, first + prefix + i) for i in range(1, new + 1)]
        first += prefix + new
    return rows


def blocks_of(rows: list[Row], size: int) -> list[list[Row]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def keys_of(block: list[Row]) -> float:
    return max(row.end for row in block) - min(row.first for row in block)


def as_they_are(blocks: list[list[Row]]) -> list[float]:
    return [keys_of(block) for block in blocks]


def evened(blocks: list[list[Row]], size: int) -> list[float]:
    """The same, but whole blocks of one sequence have the mean of their keys."""
    alike = defaultdict(list)
    for i, block in enumerate(blocks):
        mixed = len(block) < size or block[0].sequence != block[-1].sequence
        alike[-1 - i if mixed else block[0].sequence].append(i)
    keys = as_they_are(blocks)
    for own in alike.values():
        mean = sum(keys[i] for i in own) / len(own)
        for i in own:
            keys[i] = mean
    return keys


def dealt(keys: list[float], sms: int) -> float:
    """Keys of the SM that gets most: the first block, the first behind a round, and so on."""
    return max(sum(keys[sm::sms]) for sm in range(sms))


SIZES, SMS = st.sampled_from([1, 2, 4]), st.integers(1, 20)
CHUNKS = st.integers(1, 200) | st.just(WHOLE)


def sequences_of(news: st.SearchStrategy[int]) -> st.SearchStrategy[Sequences]:
    one = st.tuples(st.integers(0, 500), news, st.integers(1, 4))
    return st.lists(one, min_size=1, max_size=6)


@given(sequences_of(st.integers(1, 60)), SIZES, SMS, CHUNKS)
def test_blocks_are_dealt_in_turn_whatever_their_keys(
    sequences: Sequences, size: int, sms: int, chunk: int
) -> None:
    """Those of one sequence count as equal, and each chunk begins with the first SM again."""
    chunks = [blocks_of(rows, size) for rows in blocks_of(rows_of(sequences), chunk)]
    expected = sum(dealt(evened(blocks, size), sms) for blocks in chunks)

    assert keys_of_the_busiest(sequences, size, sms, chunk) == pytest.approx(expected)


@given(st.data(), SIZES, SMS, CHUNKS)
def test_of_sequences_within_a_block_each_block_counts_as_it_is(
    data: st.DataObject, size: int, sms: int, chunk: int
) -> None:
    sequences = data.draw(sequences_of(st.integers(1, size)))
    chunks = [blocks_of(rows, size) for rows in blocks_of(rows_of(sequences), chunk)]

    assert keys_of_the_busiest(sequences, size, sms, chunk) == sum(
        dealt(as_they_are(blocks), sms) for blocks in chunks
    )


@given(st.integers(0, 500), st.integers(1, 300), SIZES, SMS)
def test_counting_blocks_of_a_sequence_as_equal_errs_by_half_a_round_of_rows_a_block(
    prefix: int, new: int, size: int, sms: int
) -> None:
    blocks = blocks_of(rows_of([(prefix, new, 1)]), size)
    exact = dealt(as_they_are(blocks), sms)
    rounds = -(-len(blocks) // sms)

    found = keys_of_the_busiest([(prefix, new, 1)], size, sms, WHOLE)
    assert abs(found - exact) <= rounds * size * sms / 2


@given(sequences_of(st.integers(1, 60)), SIZES, CHUNKS)
def test_a_single_sm_goes_through_every_block(sequences: Sequences, size: int, chunk: int) -> None:
    chunks = [blocks_of(rows, size) for rows in blocks_of(rows_of(sequences), chunk)]
    every = sum(keys_of(block) for blocks in chunks for block in blocks)

    assert keys_of_the_busiest(sequences, size, 1, chunk) == pytest.approx(every)


def test_a_long_sequence_among_short_ones_keeps_one_sm_busy() -> None:
    sequences = [(10, 2, 2), (1000, 2, 1), (10, 2, 2)]

    assert keys_of_the_busiest(sequences, 2, 2, WHOLE) == 12 + 1002 + 12
    assert keys_of_the_busiest(sequences, 2, 5, WHOLE) == 1002


def test_a_block_of_two_sequences_goes_through_the_keys_of_both() -> None:
    assert keys_of_the_busiest([(10, 1, 1), (20, 1, 1)], 2, 132, WHOLE) == 11 + 21
    # The third row is of the second sequence too: it sees all of that one's keys.
    assert keys_of_the_busiest([(10, 1, 1), (20, 2, 1)], 2, 132, WHOLE) == 11 + 21
    assert keys_of_the_busiest([(10, 1, 1), (20, 2, 1)], 2, 1, WHOLE) == 11 + 21 + 22


def test_each_chunk_s_busiest_sm_is_waited_for() -> None:
    rows = [(10, 1, 4)]

    assert keys_of_the_busiest(rows, 1, 2, WHOLE) == 2 * 11
    assert keys_of_the_busiest(rows, 1, 2, 3) == (2 + 1) * 11
