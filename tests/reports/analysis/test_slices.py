"""Lines through the measured grid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.types.batch import Batch
from nsa_tune.reports.analysis.slices import AXES, Slice, lengths_of, slices_of


def _extend(prefix: int, new: int, count: int = 1) -> Batch:
    return Batch.extend([prefix] * count, [new] * count)


def test_a_ragged_batch_lies_on_no_line() -> None:
    ragged = Batch.extend([0, 8], [4, 4])

    assert lengths_of(ragged) is None
    assert slices_of([ragged, Batch.extend([0, 8], [8, 8])]) == []


def test_a_batch_of_sums_lies_on_no_line() -> None:
    sums = Batch.from_totals(mode="extend", q_tokens=8, kv_tokens=8, max_kv=8)

    assert lengths_of(sums) is None


def test_extends_run_along_their_new_tokens() -> None:
    grid = [
        _extend(prefix, new, count) for prefix in (0, 64) for new in (8, 2, 4) for count in (1, 4)
    ]

    lines = slices_of(grid)

    assert [line.label for line in lines] == [
        "prefix 0", "prefix 64", "4 sequences, prefix 0", "4 sequences, prefix 64",
    ]  # fmt: skip
    assert {line.axis for line in lines} == {"new"}
    assert {line.values for line in lines} == {(2, 4, 8)}


def test_without_other_new_tokens_they_run_along_the_prefix() -> None:
    lines = slices_of([_extend(0, 8), _extend(64, 8)])

    assert [(line.axis, line.values) for line in lines] == [("prefix", (0, 64))]


def test_verifies_run_along_their_sequences_grouped_by_next_n() -> None:
    grid = [Batch.verify([context] * count, next_n)
            for context in (64, 128) for count in (1, 2) for next_n in (2, 4)]  # fmt: skip

    lines = slices_of(grid)

    assert {line.axis for line in lines} == {"sequences"}
    assert [line.label for line in lines] == [
        "next_n 2, context 64", "next_n 2, context 128", "next_n 4, context 64",
        "next_n 4, context 128",
    ]  # fmt: skip


def test_a_single_batch_is_no_line() -> None:
    assert slices_of([_extend(0, 8)]) == []


@pytest.mark.parametrize(
    ("line", "value", "words"),
    [
        (slices_of([_extend(0, 1), _extend(0, 2)])[0], 310, "310 new tokens"),
        (slices_of([_extend(0, 1), _extend(0, 2)])[0], 1, "1 new token"),
        (slices_of([_extend(0, 1, 4), _extend(0, 2, 4)])[0], 2, "2 new tokens each"),
        (slices_of([Batch.decode([8]), Batch.decode([8] * 2)])[0], 1, "1 sequence"),
    ],
)
def test_amounts_read_as_words(line: Slice, value: int, words: str) -> None:
    assert line.amount(value) == words


@given(
    st.sampled_from(["extend", "decode", "target_verify", "draft_extend"]),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(4, 2**17),
)
def test_a_line_rebuilds_the_batches_that_it_was_drawn_through(
    mode: str, count: int, next_n: int, length: int
) -> None:
    makers: dict[str, Callable[[int], Batch]] = {
        "extend": lambda n: Batch.extend([length] * n, [next_n] * n),
        "decode": lambda n: Batch.decode([length] * n),
        "target_verify": lambda n: Batch.verify([length] * n, next_n),
        "draft_extend": lambda n: Batch.draft_extend([length] * n, next_n),
    }
    grid = [makers[mode](count), makers[mode](2 * count)]

    (line,) = slices_of(grid)

    assert line.axis == "sequences"
    assert line.axis in AXES[line.mode]
    assert [line.batch(value) for value in line.values] == grid
