"""Intervals of the median hold it as often as they say."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.autotune.bench.intervals import Timing, interval_of
from nsa_tune.autotune.bench.race import ALPHA, LOOKS

logs = st.lists(st.floats(-5, 5), min_size=8, max_size=60)

latencies = st.lists(st.floats(1, 1e6), min_size=6, max_size=60)


@given(latencies)
def test_the_interval_holds_the_median_and_lies_within_the_samples(samples: list[float]) -> None:
    timing = Timing.of(samples)

    assert timing.median_us == median(samples)
    assert min(samples) <= timing.low_us <= timing.median_us <= timing.high_us <= max(samples)
    assert timing.samples == len(samples)


def test_the_interval_of_many_samples_leaves_the_outliers_out() -> None:
    timing = Timing.of([100.0] * 38 + [1.0, 9000.0])

    assert (timing.low_us, timing.high_us) == (100.0, 100.0)


@pytest.mark.parametrize("count", [2, 4, 16])
def test_the_interval_covers_the_true_median_19_times_in_20(count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(4000, count, generator=generator).tolist()
    timings = [Timing.of([100 + x for x in row]) for row in drawn]
    covered = sum(timing.low_us <= 100 <= timing.high_us for timing in timings)

    assert 0.94 <= covered / len(timings) < 0.99


def test_few_samples_have_a_wider_interval_than_their_range() -> None:
    timing = Timing.of([100.0, 101.0])

    assert timing.low_us < 100.0
    assert timing.high_us > 101.0


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=60))
def test_an_interval_is_always_of_positive_times(samples: list[float]) -> None:
    timing = Timing.of(samples)

    assert 0 < timing.low_us <= timing.median_us <= timing.high_us


@given(logs, st.floats(0.001, 0.2))
def test_an_interval_holds_the_median_and_lies_within_the_values(
    values: list[float], alpha: float
) -> None:
    found = interval_of(values, alpha)

    if found is not None:
        ordered = sorted(values)
        middle = len(values) // 2
        assert min(values) <= found[0] <= ordered[middle]
        assert ordered[(len(values) - 1) // 2] <= found[1] <= max(values)


@given(logs)
def test_more_confidence_is_a_wider_interval(values: list[float]) -> None:
    narrow, wide = interval_of(values, 0.2), interval_of(values, 0.01)

    assert narrow is not None
    if wide is not None:
        assert wide[0] <= narrow[0] <= narrow[1] <= wide[1]


def test_too_few_values_have_no_interval() -> None:
    assert interval_of([1.0] * 5, 0.05) is None
    assert interval_of([1.0] * 6, 0.05) == (1.0, 1.0)


@pytest.mark.parametrize("alpha", [0.05, ALPHA / len(LOOKS)])
@pytest.mark.parametrize("count", [8, 12, 24, 40])
def test_an_interval_misses_the_median_no_more_often_than_it_says(alpha: float, count: int) -> None:
    random, trials, missed = Random(count), 4000, 0
    for _ in range(trials):
        found = interval_of([random.gauss(0, 1) for _ in range(count)], alpha)
        missed += found is not None and not found[0] <= 0 <= found[1]

    # Three standard errors of the trials beyond what is allowed.
    assert missed / trials <= alpha + 3 * (alpha / trials) ** 0.5
