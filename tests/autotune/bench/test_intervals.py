"""Samples summed up: medians with honest intervals."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.autotune.bench.intervals import Timing

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
