"""Anchors: cells that are close but no tie, far from each other."""

from __future__ import annotations

import pytest

from nsa_tune.autotune.health.anchors import anchors_of, drift_of, jobs_of
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Measurement, Status
from tests.autotune.fake_point import MANY

SETTING = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))
POINT = MANY["runnable"]


def pair(batch: str, fast_us: float, slow_us: float, half_width: float = 0.01) -> list[Measurement]:
    rows = []
    for arm, us in {"fast": fast_us, "slow": slow_us}.items():
        low_us, high_us = (1 - half_width) * us, (1 + half_width) * us
        rows.append(Measurement("runnable", batch, arm, Status.OK, us, low_us, high_us, 8))
    return rows


def word(context: int) -> str:
    return str(Batch.decode([context]))


def test_ties_long_ones_and_those_with_one_arm_are_no_anchors() -> None:
    rows = [
        *pair(word(10), 100, 101),  # a tie
        *pair(word(20), 9000, 10_000),  # takes too long
        pair(word(30), 100, 110)[0],  # alone
        *pair(word(40), 100, 110),
    ]

    assert [str(job.batch) for job in jobs_of([POINT], SETTING, rows, 4)] == [word(40)]


def test_of_many_the_closest_third_is_taken_from_and_spread() -> None:
    rows = [row for n in range(1, 31) for row in pair(word(10 * n), 100, 106 if n % 3 else 300)]

    found = [job.batch.kv_tokens for job in jobs_of([POINT], SETTING, rows, 4)]

    assert len(found) == len(set(found)) == 4
    assert not [tokens for tokens in found if tokens % 30 == 0], "three times as slow is not close"


def test_an_arm_that_a_limit_forbids_is_left_out() -> None:
    many = str(Batch.decode([10] * 5))

    assert list(jobs_of([POINT], SETTING, pair(many, 100, 110), 4)) == []


@pytest.mark.parametrize(
    ("fast_us", "half_width", "wrong"),
    [(104.0, 0.01, False), (113.0, 0.01, False), (116.0, 0.01, True), (116.0, 0.05, False)],
)
def test_a_wrong_choice_counts_beyond_what_the_intervals_leave_open(
    fast_us: float, half_width: float, wrong: bool
) -> None:
    there = pair(word(10), 100, 110)
    jobs = list(jobs_of([POINT], SETTING, there, 1))

    (anchor,) = anchors_of(jobs, there, pair(word(10), fast_us, 110, half_width))

    assert bool(anchor.problem) is wrong


def test_drift_is_the_median_over_all_cells() -> None:
    there = [row for n in (10, 20, 30) for row in pair(word(n), 100, 110)]
    here = [*pair(word(10), 100, 110), *pair(word(20), 120, 132), *pair(word(30), 900, 990)]
    jobs = list(jobs_of([POINT], SETTING, there, 3))

    assert drift_of(anchors_of(jobs, there, here)) == pytest.approx(0.2)
    assert drift_of([]) == 0
