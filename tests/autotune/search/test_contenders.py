"""Contenders: the normal model's loss, its limits, and how it is calibrated."""

from __future__ import annotations

from math import exp, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch
from nsa_tune.autotune.search.contenders import (
    contenders,
    expected_loss,
    expected_loss_bound,
)
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Measurement, Status
from tests.autotune.fake_point import runnable

gaps, spreads = st.floats(0, 3), st.floats(0.001, 1)
SETTING = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))


@pytest.mark.parametrize(("gap", "spread"), [(0.0, 0.1), (0.05, 0.1), (0.3, 0.2)])
def test_the_expected_loss_is_that_of_a_simulation(gap: float, spread: float) -> None:
    random, trials = Random(0), 200_000
    lost = sum(max(-random.gauss(gap, spread), 0.0) for _ in range(trials)) / trials

    assert expected_loss(gap, spread) == pytest.approx(lost, rel=0.05)


@given(gaps, gaps, spreads)
def test_a_wider_gap_has_a_smaller_expected_loss(gap: float, other: float, spread: float) -> None:
    assert expected_loss(max(gap, other), spread) <= expected_loss(min(gap, other), spread) + 1e-12


@given(gaps, spreads, spreads)
def test_a_wider_spread_has_a_larger_expected_loss(gap: float, spread: float, other: float) -> None:
    low, high = sorted((spread, other))

    assert expected_loss(gap, low) <= expected_loss(gap, high) + 1e-12


def test_certain_estimates_have_no_expected_loss() -> None:
    assert expected_loss(0.1, 0.0) == 0.0
    assert expected_loss(5.0, 0.01) == 0.0


def _estimate(deviation: float) -> Estimate:
    return Estimate(2.0, 2.0 * exp(-2 * deviation), 2.0 * exp(2 * deviation), False)


def test_two_equal_arms_lose_half_the_mean_difference() -> None:
    pair = [_estimate(0.3), _estimate(0.4)]

    assert expected_loss_bound(pair) == pytest.approx(0.5 / sqrt(2 * 3.141592653589793))


def test_an_unknown_arm_is_worth_measuring() -> None:
    known = _estimate(0.0)

    assert expected_loss_bound([known, None]) > expected_loss_bound([known, known])


def _policy(*batches: int) -> Policy:
    point = runnable("fast", "slow")
    rows = [
        Measurement(
            point.name, str(Batch.decode([10] * n)), arm, Status.OK, us * n, 0.99 * us * n,
            1.01 * us * n, 8,
        )
        for n in batches
        for arm, us in (("fast", 1.0), ("slow", 1.2))
    ]  # fmt: skip
    return Policy.fit(point, SETTING, rows)


def test_contenders_come_fastest_first() -> None:
    policy = _policy(1, 2, 3, 4)
    batch = Batch.decode([10, 10])

    ranked = contenders(policy, batch)["runnable"]

    assert [one and one.latency_us for one in ranked] == pytest.approx([2.0, 2.4])


def test_an_arm_that_a_guard_forbids_is_no_contender() -> None:
    assert contenders(_policy(1, 2, 3, 4), Batch.decode([10] * 5)) == {}


def test_with_too_few_measurements_all_contenders_are_unknown() -> None:
    ranked = contenders(_policy(1), Batch.decode([10]))["runnable"]

    assert ranked == [None, None]
