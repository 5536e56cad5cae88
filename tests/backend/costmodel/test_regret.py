"""Regret: of known times, of several batches, of two estimates, and of the worst batches."""

from __future__ import annotations

from math import exp, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.costmodel.regret import (
    expected_regret,
    mean_regret,
    regret,
    slowdown,
    tail_mean,
)
from nsa_tune.backend.costmodel.surface import Estimate


def test_regret_is_over_the_fastest() -> None:
    times = {"a": 10.0, "b": 12.0}

    assert regret(times, "a") == 0
    assert regret(times, "b") == pytest.approx(0.2)
    assert slowdown(times, "b") == 1.2


def test_the_mean_regret_counts_each_batch_by_its_share() -> None:
    batches = [{"a": 10.0, "b": 15.0}, {"a": 20.0, "b": 10.0}]

    assert mean_regret(batches, [0.75, 0.25], "a") == pytest.approx(0.25)
    assert mean_regret(batches, [0.75, 0.25], "b") == pytest.approx(0.375)


def _estimate(time_us: float, wide: float) -> Estimate:
    return Estimate(time_us, time_us / wide, time_us * wide, False)


def test_a_sure_choice_has_no_regret_to_expect_and_a_coin_toss_half_its_spread() -> None:
    assert expected_regret(_estimate(10, 1.01), _estimate(20, 1.01)) == pytest.approx(0, abs=1e-9)
    assert expected_regret(_estimate(20, 1.0), _estimate(10, 1.0)) == pytest.approx(1)
    small = expected_regret(_estimate(10, 1.1), _estimate(10, 1.1))
    assert 0 < small < expected_regret(_estimate(10, 1.3), _estimate(10, 1.3)) < 0.3


def test_the_expected_regret_is_the_mean_over_the_intervals() -> None:
    taken, other, random = _estimate(11, 1.2), _estimate(10, 1.1), Random(1)
    losses = [
        max(
            taken.latency_us * exp(random.gauss(0, log(1.2) / 2))
            / (other.latency_us * exp(random.gauss(0, log(1.1) / 2))) - 1,
            0,
        )
        for _ in range(40_000)
    ]  # fmt: skip

    assert expected_regret(taken, other) == pytest.approx(sum(losses) / len(losses), rel=0.03)


def test_the_tail_is_weighted() -> None:
    values = [(1.0, 0.1), (0.5, 0.1), (0.0, 0.8)]

    assert tail_mean(values, 0.1) == pytest.approx(1.0)
    assert tail_mean(values, 0.2) == pytest.approx(0.75)
    assert tail_mean(values, 1.0) == pytest.approx(0.15)
    assert tail_mean([], 0.1) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 1)), min_size=1, max_size=20))
def test_a_smaller_tail_has_a_larger_mean(values: list[tuple[float, float]]) -> None:
    assert tail_mean(values, 0.1) >= tail_mean(values, 1.0) - 1e-9
