"""The exhaustive schedule: the grid in its order, without stored rows."""

from __future__ import annotations

from dataclasses import replace

from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.search.exhaustive import Exhaustive
from nsa_tune.autotune.search.schedule import Schedule
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Measurement, Status
from tests.autotune.fake_point import runnable

SETTING = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))


def jobs(schedule: Schedule) -> list[Job]:
    found = []
    while (job := schedule.next()) is not None:
        found.append(job)
    return found


def test_every_batch_with_two_allowed_arms_comes_once_in_the_grid_s_order() -> None:
    point = runnable("fast", "slow")
    schedule = Exhaustive([point], SETTING, [])

    assert schedule.remaining() == 4
    assert [str(job.batch) for job in jobs(schedule)] == [
        str(batch) for batch in point.grid(SETTING)[:4]
    ]
    assert schedule.remaining() == 0


def test_points_take_turns() -> None:
    """So a run that ends early has measured some batches of each."""
    one, other = runnable("fast", "slow"), replace(runnable("fast", "slow"), name="other")

    found = jobs(Exhaustive([one, other], SETTING, []))

    assert [job.point.name for job in found] == ["runnable", "other"] * 4


def test_measured_arms_are_left_out_and_so_are_batches_without_others() -> None:
    point = runnable("fast", "slow")
    first, second = (str(batch) for batch in point.grid(SETTING)[:2])
    known = [
        Measurement("runnable", first, "fast", Status.OK, 1.0, 1.0, 1.0, 8),
        Measurement("runnable", first, "slow", Status.FAILED, reason="no"),
        Measurement("runnable", second, "slow", Status.OK, 1.0, 1.0, 1.0, 8),
    ]

    found = jobs(Exhaustive([point], SETTING, known))

    assert str(found[0].batch) == second
    assert [arm.name for arm in found[0].arms] == ["fast"]
    assert len(found) == 3
