"""What V4's kernels make of the rows of a prefill: the same as when each row is looked at."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.points.v4_prefill.work import Run, runs_of_rows, schedule, split_schedule
from tests.backend.points.test_schedules import flashmla_parts


class Shape(NamedTuple):
    """Of a layer; `most` compressed tokens are at least as many as the window spans."""

    ratio: int
    most: int
    window: int


RATIO_4 = Shape(4, 1024, 128)
RUNS = st.lists(
    st.builds(Run, st.integers(1, 30), st.integers(2, 40), st.just(1)), min_size=1, max_size=5
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    ratio, window = draw(st.sampled_from([4, 128])), draw(st.sampled_from([64, 100, 128]))
    return Shape(ratio, draw(st.integers(max(window // ratio, 1), 1100)), window)


def row_at(position: int, shape: Shape) -> tuple[int, int]:
    """Blocks and steps of the row at `position`, the first of which is 1."""
    in_window = min(position, shape.window)
    extra = min(position // shape.ratio, shape.most)
    return -(-in_window // 64) + max(-(-extra // 64), 1), -(-(in_window + extra) // 128)


@given(st.integers(0, 6000), st.integers(1, 800), st.integers(1, 3), shapes())
def test_runs_are_the_rows_one_by_one(prefix: int, new: int, count: int, shape: Shape) -> None:
    runs = runs_of_rows(prefix, new, count, *shape)
    rows = [(run.blocks, run.steps) for run in runs for _ in range(run.rows)]

    assert rows == [row_at(prefix + i, shape) for i in range(1, new + 1)] * count


def test_rows_that_select_as_many_tokens_as_they_may_are_one_run() -> None:
    assert list(runs_of_rows(4096, 10_000, 2, *RATIO_4)) == 2 * [Run(10_000, 2 + 16, 9)]


@given(RUNS, st.integers(1, 20) | st.integers(1, 140))
def test_the_schedule_is_flashmla_s(runs: list[Run], parts: int) -> None:
    found = flashmla_parts([run.blocks for run in runs for _ in range(run.rows)], parts)
    pieces = [row for own in found for row, _ in own]

    assert schedule(runs, parts) == (
        max(sum(taken + 1 for _, taken in own) for own in found),
        sum(pieces.count(row) > 1 for row in pieces),
    )


@given(st.integers(1, 4), st.integers(2, 40), st.integers(1, 140))
def test_as_many_equal_rows_for_each_part_are_not_split(each: int, blocks: int, parts: int) -> None:
    assert split_schedule([Run(each * parts, blocks, 1)], parts) == (each * (blocks + 1), False)


@given(st.integers(5, 12), st.integers(2, 40), st.integers(20, 140))
def test_of_many_rows_the_fullest_part_has_about_an_even_share(
    each: int, blocks: int, parts: int
) -> None:
    runs = [Run(each * parts, blocks, 1)]
    fullest, splits = split_schedule(runs, parts)

    assert splits
    assert fullest == pytest.approx(schedule(runs, parts)[0], rel=0.15)
