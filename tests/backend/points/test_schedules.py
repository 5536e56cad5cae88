"""How kernels spread rows over the SMs: the terms say what the kernels' own code does."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.kernels import sparse_mla, split_sparse_mla
from nsa_tune.backend.points import schedules
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of

TOPK, SMS = 2048, 132
HEADS = (8, 16, 32, 64, 128)
LENGTHS = st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 400)), min_size=1, max_size=9)


def setting_of(heads: int, layout: KVLayout = KVLayout.BF16) -> Setting:
    return Setting(profile_of("deepseek-v3.2"), heads, layout, KNOWN["NVIDIA H200"])


def extend_of(lengths: list[tuple[int, int]]) -> Batch:
    return Batch.extend([prefix for prefix, _ in lengths], [new for _, new in lengths])


# --- makespan


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=300), st.integers(1, 140))
def test_a_makespan_is_near_that_of_rows_in_their_order(work: list[int], slots: int) -> None:
    """Half of the longest row off at most, behind the even share."""
    free = [0] * slots
    for row in work:
        free[free.index(min(free))] += row
    longest, share = max(work), sum(work) / slots
    found = schedules.makespan(len(work), sum(work), longest, slots)

    assert found <= -(-len(work) // slots) * longest
    assert abs(found - max(free)) <= longest / 2 or len(work) <= slots or found < max(free)
    assert found >= min(share, longest) * (1 - 1e-9)


@given(st.integers(1, 600), st.integers(1, 3000), st.integers(1, 140))
def test_it_grows_with_rows_and_shrinks_with_slots(rows: int, longest: int, slots: int) -> None:
    def equal(rows: int, slots: int) -> float:
        return schedules.makespan(rows, rows * longest, longest, slots)

    assert equal(rows, slots) <= equal(rows + 1, slots)
    assert equal(rows, slots) >= equal(rows, slots + 1)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 9)), min_size=1), st.integers(1, 40))
def test_pieces_go_to_the_slot_that_has_the_least(
    pieces: list[tuple[float, int]], slots: int
) -> None:
    free, each = [0.0] * slots, [length for length, count in pieces for _ in range(count)]
    for length in each:
        free[free.index(min(free))] += length
    found = schedules.dealt(pieces, slots)

    few, ones = len(each) < 6 * slots, schedules.dealt([(length, 1) for length in each], slots)
    assert found == ones == pytest.approx(max(free)) if few else max(each) <= found
    assert sum(each) / slots - 1e-6 <= found <= sum(each) / slots + max(each) + 1e-6


def test_rows_that_fit_at_once_end_with_the_longest() -> None:
    assert schedules.makespan(3, 10 + 20 + 500, 500, 66) == 500


# --- pairs


@given(LENGTHS)
def test_a_query_attends_to_index_topk_keys_at_most(lengths: list[tuple[int, int]]) -> None:
    batch = extend_of(lengths)
    exact = sum(
        min(prefix + i, TOPK) for prefix, new in lengths for i in range(1, new + 1)
    )  # fmt: skip

    assert schedules.attended_pairs(batch, TOPK) == exact
    assert schedules.attended_pairs(batch.sums, TOPK) >= exact


@given(LENGTHS)
def test_whole_steps_lie_between_the_pairs_and_the_longest_row_for_all(
    lengths: list[tuple[int, int]],
) -> None:
    batch = extend_of(lengths)
    attended = schedules.attended_pairs(batch, TOPK)
    steps, longest = schedules.step_pairs(batch, TOPK, attended)

    assert longest == -(-min(batch.max_kv, TOPK) // schedules.STEP) * schedules.STEP
    assert attended <= steps * (1 + 1e-9)
    assert steps <= batch.q_tokens * longest


@given(prefix=st.integers(0, 5000), new=st.integers(1, 700), count=st.integers(1, 4))
def test_a_row_s_keys_are_rounded_up_to_whole_steps(prefix: int, new: int, count: int) -> None:
    """Where many rows of a sequence end in different steps, by half a step on average."""
    batch = Batch.extend([prefix] * count, [new] * count)
    keys = [min(prefix + i, TOPK) for i in range(1, new + 1)]
    exact = count * sum(-(-row // 128) * 128 for row in keys)
    found, _ = schedules.step_pairs(batch, TOPK, schedules.attended_pairs(batch, TOPK))

    assert abs(found - exact) <= 128 * batch.q_tokens
    if prefix + new <= 128 or prefix >= TOPK:
        assert found == exact


# --- FlashMLA


def flashmla_parts(rows: list[int], parts: int) -> list[list[tuple[int, int]]]:
    """FlashMLA's schedule (`get_mla_metadata`) for rows of so many blocks: by part the rows that it
    begins, by number, and the blocks that it takes of each."""
    time = -(-sum(blocks + 5 for blocks in rows) // parts) + 5
    left, found = list(enumerate(rows)), []
    for _ in range(parts):
        free, own = time, []
        while left and free:
            row, blocks = left[0]
            if blocks + 5 <= free:
                own.append(left.pop(0))
                free -= blocks + 5
            else:
                if free > 5:
                    own.append((row, free - 5))
                    left[0] = (row, blocks - (free - 5))
                free = 0
        found.append(own)
    assert not left
    return found


def fullest_part(rows: list[int], parts: int) -> int:
    return max(sum(blocks + 5 for _, blocks in own) for own in flashmla_parts(rows, parts))


@pytest.mark.parametrize("heads", [16, 128])
@given(rows=st.integers(1, 600))
def test_flashmla_s_fullest_part_is_as_its_schedule_says(heads: int, rows: int) -> None:
    found = schedules.flash_mla_blocks(setting_of(heads))(rows)
    most = fullest_part([32] * rows, SMS if heads <= 64 else SMS // 2)

    assert most <= found <= most + 5


@pytest.mark.parametrize("next_n", [2, 3, 4])
@given(count=st.integers(1, 300))
def test_a_sequence_s_queries_in_one_row_have_fewer_parts(next_n: int, count: int) -> None:
    found = schedules.grouped_blocks(setting_of(16))(Batch.verify([5000] * count, next_n))
    most = fullest_part([32] * count, max(SMS // next_n, 1))

    assert most <= found <= most + 5


@given(queries=st.integers(1, 600))
def test_all_queries_in_one_row_are_split_while_they_leave_sms_over(queries: int) -> None:
    found, parts = schedules.mixed_blocks(setting_of(16))(queries), SMS // queries

    if parts < 2:
        assert found == -(-queries // SMS) * (32 + 5)
    else:
        assert fullest_part([32], parts) <= found <= fullest_part([32], parts) + 5


# --- FlashAttention-3


def most_parts(rows: int, heads: int) -> int:
    """FlashAttention-3's `num_splits_heuristic` over the tiles of all rows: the fewest parts that
    fill the waves of tiles at least 0.85 times as well as the best number does."""
    if Fraction(rows * heads, 64) >= Fraction(8, 10) * SMS:
        return 1
    tiles = -(-rows * heads // 64)
    waves = {parts: Fraction(tiles * parts, SMS) for parts in range(1, TOPK // 64 + 1)}
    filled = {parts: wave / ceil(wave) for parts, wave in waves.items()}
    enough = Fraction(85, 100) * max(filled.values())
    return min(parts for parts, share in filled.items() if share >= enough)


@pytest.mark.parametrize("heads", HEADS)
def test_fa3_merges_as_many_parts_as_its_heuristic_says(heads: int) -> None:
    terms = schedules.fa3(setting_of(heads))
    tiles = -(-heads // 64)
    for rows in range(1, 450, 7):
        batch = Batch.decode([5000] * rows)
        # No part is longer than a tenth more than an even share.
        even = -(-32 // -(-(32 * rows * 11 * tiles) // (10 * SMS)))
        parts = min(most_parts(rows, heads), even)
        found = terms(batch, 2048.0 * rows)

        assert found.fa3_merged_parts == (rows * parts if parts > 1 else 0)
        assert found.fa3_merges == (parts > 1)
        assert found.fa3_makespan_blocks == -(-rows * parts * tiles // SMS) * -(-32 // parts)


def test_a_long_row_among_many_short_ones_is_not_split_and_begun_first() -> None:
    ragged = Batch.decode([2048, *[64] * 400])

    found = schedules.fa3(setting_of(128))(ragged, schedules.attended_pairs(ragged, TOPK))
    assert (found.fa3_makespan_blocks, found.fa3_merges) == (2048 / 64, 0)


def test_rows_that_are_nearly_alike_take_whole_waves() -> None:
    batch = Batch.extend([1465] * 34, [2] * 34)

    found = schedules.fa3(setting_of(16))(batch, schedules.attended_pairs(batch, TOPK))
    # 136 halves of 23 blocks on 132 SMs.
    assert found == (24, 136, 1)


# --- Triton


@pytest.mark.parametrize("heads", HEADS)
def test_the_triton_kernels_split_as_they_say(heads: int) -> None:
    block = 64 if heads > 32 else 32 if heads > 16 else 16
    blocks, keys = -(-heads // block), schedules.triton_keys_per_sm(setting_of(heads))
    split_keys = schedules.split_triton_keys_per_sm(setting_of(heads))
    for rows in range(1, 400):
        parts = sparse_mla._splits(rows * blocks, TOPK, SMS)
        assert keys(rows) == -(-rows * parts * blocks // SMS) * TOPK / parts, rows
        parts = split_sparse_mla.shape_of(rows, heads, TOPK, SMS).splits
        assert split_keys(rows) == -(-rows * parts * -(-heads // 16) // SMS) * TOPK / parts, rows
