"""What a V4 prefill makes of its rows: the same as when each row is looked at by itself."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import fmean
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.sequences import runs as sequences_as_runs
from nsa_tune.backend.points.v4_prefill.work import (
    Run,
    Work,
    _most_ahead,
    runs_of_rows,
    schedule,
    work_of,
)
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from tests.backend.points.test_splits import flashmla_parts, until_the_end

Sequence = tuple[int, int, int]


class Shape(NamedTuple):
    """Of a layer; `most` compressed tokens are at least as many as the window spans."""

    ratio: int
    most: int
    window: int


RATIO_4, RATIO_128 = Shape(4, 1024, 128), Shape(128, 2048, 128)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    ratio, window = draw(st.sampled_from([4, 128])), draw(st.sampled_from([64, 100, 128]))
    return Shape(ratio, draw(st.integers(max(window // ratio, 1), 1100)), window)


def sequences_of(most_new: int) -> st.SearchStrategy[Sequence]:
    prefixes = st.integers(0, 200) | st.integers(0, 6000)
    return st.tuples(prefixes, st.integers(1, most_new), st.integers(1, 3))


def row_at(position: int, shape: Shape) -> tuple[int, int]:
    """Blocks and steps of the row at `position`, the first of which is 1."""
    in_window = min(position, shape.window)
    extra = min(position // shape.ratio, shape.most)
    return -(-in_window // 64) + max(-(-extra // 64), 1), -(-(in_window + extra) // 128)


def rows_of(sequence: Sequence, shape: Shape) -> list[tuple[int, int]]:
    prefix, new, count = sequence
    return [row_at(prefix + i, shape) for i in range(1, new + 1)] * count


def scheduled(blocks: list[int], parts: int) -> tuple[int, int]:
    """Blocks of the fullest of FlashMLA's parts with one a row, and parts of split rows."""
    found = flashmla_parts(blocks, parts)
    pieces = [row for own in found for row, _ in own]
    return (
        max(sum(taken + 1 for _, taken in own) for own in found),
        sum(pieces.count(row) > 1 for row in pieces),
    )


# --- rows


@given(sequences_of(800), shapes())
def test_runs_are_the_rows_one_by_one(sequence: Sequence, shape: Shape) -> None:
    runs = runs_of_rows(*sequence, *shape)
    rows = [(run.blocks, run.steps) for run in runs for _ in range(run.rows)]

    assert rows == rows_of(sequence, shape)


@given(st.integers(0, 6000), st.integers(1, 800), shapes())
def test_behind_the_window_runs_are_as_long_as_can_be(prefix: int, new: int, shape: Shape) -> None:
    runs = list(runs_of_rows(shape.window + prefix, new, 1, *shape))

    assert all(one[1:] != after[1:] for one, after in pairwise(runs))


def test_a_row_without_compressed_tokens_has_an_empty_block_of_them() -> None:
    assert list(runs_of_rows(0, 3, 1, *RATIO_4)) == [Run(3, 1 + 1, 1)]


def test_one_compressed_token_more_than_a_block_holds_is_a_block_more() -> None:
    # 65 * 4 = 260 tokens have 65 compressed ones, in a block of 64 and another one.
    assert list(runs_of_rows(257, 4, 1, *RATIO_4)) == [Run(2, 2 + 1, 2), Run(2, 2 + 2, 2)]


def test_rows_that_select_as_many_tokens_as_they_may_are_one_run() -> None:
    assert list(runs_of_rows(4096, 10_000, 2, *RATIO_4)) == 2 * [Run(10_000, 2 + 16, 9)]


# --- FlashMLA's schedule

RUNS = st.lists(
    st.builds(Run, st.integers(1, 30), st.integers(2, 40), st.just(1)), min_size=1, max_size=5
)


@given(RUNS, st.integers(1, 20) | st.integers(1, 140))
def test_the_schedule_is_flashmla_s(runs: list[Run], parts: int) -> None:
    blocks = [run.blocks for run in runs for _ in range(run.rows)]

    assert schedule(runs, parts) == scheduled(blocks, parts)


@given(st.integers(1, 5), st.integers(2, 40), st.integers(1, 140))
def test_as_many_equal_rows_for_each_part_are_not_split(each: int, blocks: int, parts: int) -> None:
    assert schedule([Run(each * parts, blocks, 1)], parts) == (each * (blocks + 1), 0)


def test_a_long_row_is_split_among_the_parts() -> None:
    # Of (12 + 5) / 4 blocks' time and 5, two parts take 5 blocks each and one the last two.
    assert schedule([Run(1, 12, 1)], 4) == (5 + 1, 3)


# --- work


def test_rows_that_fill_the_parts_are_whole() -> None:
    # The 128th token: its window, the first compressed token, and two steps for 129 keys.
    assert work_of([(127, 1, 3)], *RATIO_128, 2, 2) == Work(
        blocks_of_the_fullest=2 * (3 + 1), splits_rows=0, parts_merged=0,
        steps=3 * 2, steps_of_the_busiest=2 * (2 + 1),
    )  # fmt: skip


def test_a_row_by_itself_is_a_block_for_each_of_many_parts() -> None:
    # 128 tokens and 1024 compressed ones.
    assert work_of([(4095, 1, 1)], *RATIO_4, 66, 66) == Work(
        blocks_of_the_fullest=1 + 1, splits_rows=1, parts_merged=18,
        steps=9, steps_of_the_busiest=9 + 1,
    )  # fmt: skip


@given(st.lists(sequences_of(40), min_size=1, max_size=4), shapes(), st.data())
def test_of_few_rows_a_part_all_is_as_row_by_row(
    sequences: list[Sequence], shape: Shape, data: st.DataObject
) -> None:
    rows = [row for one in sequences for row in rows_of(one, shape)]
    parts, slots = (data.draw(st.integers(-(-len(rows) // 4), 140)) for _ in range(2))
    fullest, merged = scheduled([blocks for blocks, _ in rows], parts)

    assert work_of(sequences, *shape, parts, slots) == Work(
        fullest, merged > 0, merged,
        sum(steps for _, steps in rows), until_the_end([steps + 1 for _, steps in rows], slots),
    )  # fmt: skip


@given(st.integers(4, 12), st.integers(1, 66), st.integers(128, 6000))
def test_of_many_equal_rows_it_is_about_as_much(each: int, more: int, prefix: int) -> None:
    many = work_of([(prefix, 1, 66 * each + more)], *RATIO_4, 66, 66)
    blocks, steps = row_at(prefix + 1, RATIO_4)
    fullest, _ = scheduled([blocks] * (66 * each + more), 66)

    assert many.blocks_of_the_fullest == pytest.approx(fullest, rel=0.15)
    # The slots that have the most rows end up to half a row before or after.
    busiest = (each + 1) * (steps + 1)
    assert abs(many.steps_of_the_busiest - busiest) <= steps / 2 + 1


@pytest.mark.parametrize(
    "sequences",
    [
        [(4, 277, 1), (50, 2, 1), (29436, 12, 1), (78240, 4, 1)],
        [(17, 935, 1), (4, 373, 1), (9756, 6, 1), (12483, 15, 1), (5, 2, 1)],
        [(382, 371, 1), (12738, 40, 1)],
        [(4, 277, 1), (29436, 1, 16)],
        [(4, 800, 1), (600, 300, 1), (29436, 1, 16)],
    ],
)
def test_long_rows_among_many_fill_a_part_that_ends_last(sequences: list[Sequence]) -> None:
    """An even share of all blocks is much less: a short row's beginning weighs more than it
    takes."""
    many = work_of(sequences, *RATIO_4, 66, 66)
    blocks = [one for sequence in sequences for one, _ in rows_of(sequence, RATIO_4)]
    fullest, _ = scheduled(blocks, 66)

    assert many.blocks_of_the_fullest == pytest.approx(fullest, rel=0.12)
    assert (sum(blocks) + len(blocks)) / 66 < 0.85 * fullest


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 20)), max_size=8),
    st.integers(0, 20),
    st.integers(1, 100),
)
def test_the_rows_most_ahead_are_found_wherever_they_begin(
    runs: list[tuple[int, int, int]], tenths: int, room: int
) -> None:
    each, best = tenths / 10, 0.0
    for first in range(len(runs)):
        ahead, left = 0.0, float(room)
        for rows, own, takes in runs[first:]:
            fit = min(rows, left / own)
            if takes <= own * each:
                break
            ahead, left = ahead + fit * (takes - own * each), left - fit * own
        best = max(best, ahead)

    assert _most_ahead(runs, each, room) == pytest.approx(best)


@pytest.mark.parametrize(("heads", "parts"), [(128, 66), (64, 132)])
def test_of_many_rows_the_fullest_part_is_about_the_schedule_s(heads: int, parts: int) -> None:
    """Random prefills."""
    profile, random = profile_of("deepseek-v4"), Random(2)
    setting = Setting(profile, heads, KVLayout.V4_PAGED, KNOWN["NVIDIA H200"])
    errors: list[float] = []
    while len(errors) < 200:
        batch = POINTS["v4_prefill_c4"].sample(setting, random)
        if not 4 * parts < batch.q_tokens < 40 * parts:
            continue
        rows = list(sequences_as_runs(batch))
        found = work_of(rows, 4, profile.index_topk, profile.window, parts, parts)
        every = [one for row in rows for one in runs_of_rows(*row, 4, profile.index_topk, 128)]
        errors.append(abs(found.blocks_of_the_fullest / schedule(every, parts)[0] - 1))

    assert fmean(errors) < 0.02
    assert max(errors) < 0.2


def test_long_rows_that_come_last_are_waited_for_unless_rows_are_many() -> None:
    short, long = (0, 300, 1), (30_000, 60, 1)
    last, first = (work_of(order, *RATIO_4, 132, 132) for order in ([short, long], [long, short]))
    assert last.steps_of_the_busiest > first.steps_of_the_busiest

    last, first = (work_of(order, *RATIO_4, 66, 66) for order in ([short, long], [long, short]))
    assert last == first
