"""What sparse graphs read of a batch, against the same counted row by row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.engines.sglang.facts import PAGE
from nsa_tune.engines.sglang.pass_mode.whole_pass.sparse_inputs import SEQUENCES, SparseInputs

TOPK, MOST_KEYS = 100, 64 * PAGE

_SEQUENCE = st.tuples(st.integers(0, 120), st.integers(1, 8))


def _written(prefix_lens: Sequence[int], extend_lens: Sequence[int]) -> SparseInputs:
    inputs = SparseInputs(MOST_KEYS, torch.device("cpu"))
    inputs.write(prefix_lens, extend_lens)
    return inputs


@given(st.lists(_SEQUENCE, min_size=1, max_size=SEQUENCES), st.integers(0, 5))
def test_each_row_sees_its_sequence_up_to_itself(
    sequences: list[tuple[int, int]], padding: int
) -> None:
    prefix_lens, extend_lens = zip(*sequences, strict=True)
    rows = _written(prefix_lens, extend_lens).rows(sum(extend_lens) + padding, TOPK)

    expected, first = [], 0
    for i, (prefix, new) in enumerate(sequences):
        for place in range(new):
            seen = prefix + place + 1
            expected.append((i, first, first + seen, seen, min(seen, TOPK)))
        first += prefix + new
    # Padding sees the first key of all.
    expected += [(0, 0, 1, 1, 1)] * padding
    columns = (rows.sequences, rows.first_keys, rows.last_keys, rows.kv_lens, rows.selected)
    assert all(column.dtype is torch.int32 and column.is_contiguous() for column in columns)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


@given(st.lists(_SEQUENCE, min_size=1, max_size=SEQUENCES))
def test_keys_name_the_slot_of_each_key_in_turn(sequences: list[tuple[int, int]]) -> None:
    prefix_lens, extend_lens = zip(*sequences, strict=True)
    kv_lens = [prefix + new for prefix, new in sequences]
    inputs = _written(prefix_lens, extend_lens)
    table = torch.full((len(kv_lens) + 1, 3 * PAGE), -PAGE, dtype=torch.int32)
    for i, kv_len in enumerate(kv_lens):
        # Sequence i has pages 3 i + 1 and on, the last one first.
        pages = torch.arange(3).flip(0) + 3 * i + 1
        table[i + 1, :kv_len] = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:kv_len]

    inputs.write_pages(table, torch.arange(1, len(kv_lens) + 1), max(kv_lens))

    keys = inputs.keys()
    assert int(keys.count) == sum(kv_lens)
    assert keys.count.dtype is keys.slots.dtype is torch.int32
    assert len(keys.slots) == MOST_KEYS
    expected = [table[i + 1, :kv_len] for i, kv_len in enumerate(kv_lens)]
    assert torch.equal(keys.slots[: sum(kv_lens)], torch.cat(expected))


def test_a_shorter_batch_leaves_nothing_of_the_one_before() -> None:
    inputs = _written([50] * SEQUENCES, [3] * SEQUENCES)
    inputs.write([7], [2])
    rows = inputs.rows(4, TOPK)
    assert rows.sequences.tolist() == [0] * 4
    assert rows.kv_lens.tolist() == [8, 9, 1, 1]
    assert inputs.kv_lens.tolist() == [9] + [0] * (SEQUENCES - 1)


@pytest.mark.parametrize(
    ("prefix_lens", "extend_lens"),
    [([0] * (SEQUENCES + 1), [1] * (SEQUENCES + 1)), ([MOST_KEYS], [1])],
)
def test_a_batch_without_room_is_refused(prefix_lens: list[int], extend_lens: list[int]) -> None:
    with pytest.raises(AssertionError, match="a batch that fits"):
        _written(prefix_lens, extend_lens)
