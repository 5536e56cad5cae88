"""Which of two measured selections a call gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.engines.sglang.topk.times import TopkTime, TopkTimes

ROWS, KEYS = (64, 256, 1024), (3072, 8192, 32768)


def times(wins: set[tuple[int, int]], method: str = "PAGED") -> TopkTimes:
    return TopkTimes(
        TopkTime(method, rows, keys, 100.0, 50.0 if (rows, keys) in wins else 100.0)
        for rows in ROWS
        for keys in KEYS
    )


ALL = {(rows, keys) for rows in ROWS for keys in KEYS}


@given(rows=st.integers(64, 20000), keys=st.integers(2049, 300_000))
def test_what_is_faster_everywhere_is_taken_from_the_fewest_rows_on(rows: int, keys: int) -> None:
    assert times(ALL).is_win("PAGED", rows, keys)
    assert not times(set()).is_win("PAGED", rows, keys)


def test_fewer_rows_than_were_measured_are_left_to_the_engine() -> None:
    assert not times(ALL).is_win("PAGED", 63, 8192)


@given(
    lost=st.sampled_from(sorted(ALL)), rows=st.integers(64, 2000), keys=st.integers(2049, 50_000)
)
def test_all_measured_sizes_around_a_call_must_be_won(
    lost: tuple[int, int], rows: int, keys: int
) -> None:
    def near(sizes: tuple[int, ...], size: int, measured: int) -> bool:
        held = min(max(size, sizes[0]), sizes[-1])
        between = [one for one in sizes if min(held, measured) < one < max(held, measured)]
        return held == measured or (not between and held not in sizes)

    around = near(ROWS, rows, lost[0]) and near(KEYS, keys, lost[1])

    assert times(ALL - {lost}).is_win("PAGED", rows, keys) == (not around)


def test_each_method_is_measured_by_itself() -> None:
    found = TopkTimes([*times(ALL).times, *times(set(), "RAGGED").times])

    assert found.is_win("PAGED", 500, 9000)
    assert not found.is_win("RAGGED", 500, 9000)
    assert found.is_win("PAGED", 500, 9000)


def test_a_method_that_was_not_measured_is_left_to_the_engine() -> None:
    assert not times(ALL).is_win("RAGGED", 500, 9000)
    assert not TopkTimes([]).is_win("PAGED", 500, 9000)


def test_sizes_for_which_there_was_no_memory_are_as_the_largest_that_had_some() -> None:
    found = TopkTimes(one for one in times(ALL).times if (one.rows, one.keys) != (1024, 32768))

    assert found.is_win("PAGED", 8192, 38912)


@pytest.mark.parametrize(("own_us", "win"), [(96.0, True), (98.0, False), (100.0, False)])
def test_a_little_faster_is_no_win(own_us: float, win: bool) -> None:
    assert TopkTime("PAGED", 64, 3072, 100.0, own_us).is_win == win


@pytest.mark.parametrize(
    ("more_us", "win"), [(-30.0, True), (0.0, True), (40.0, True), (50.0, False)]
)
def test_a_longer_launch_counts_as_time_of_the_kernel(more_us: float, win: bool) -> None:
    assert TopkTime("PAGED", 64, 3072, 100.0, 50.0, more_us).is_win == win
