"""Measuring a batch: only right arms are timed, the others are kept with their reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from nsa_tune import Batch, MachineUnfit
from nsa_tune.autotune.bench.measure import measure_batch
from nsa_tune.autotune.bench.timing import CpuTimer
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Case, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Measurement, Status
from tests.autotune.fake_point import ARMS, runnable

CPU = torch.device("cpu")
SETTING = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))


def measured(*arms: str, timer: CpuTimer | None = None) -> dict[str, Measurement]:
    point = runnable(*arms)
    rows = measure_batch(
        point, Batch.decode([10, 20]), point.arms, SETTING, CPU, timer or CpuTimer()
    )
    return {row.arm: row for row in rows}


def test_right_arms_have_a_latency_with_its_interval() -> None:
    rows = measured("fast", "slow")

    for row in rows.values():
        assert row.status is Status.OK
        assert row.latency_us is not None
        assert row.low_us is not None
        assert row.high_us is not None
        assert row.low_us <= row.latency_us <= row.high_us
        assert row.samples >= 2
        assert row.error == 0.0
        assert (row.point, row.batch, row.reason) == ("runnable", "decode:n1:10,20", "")
    assert rows["slow"].latency_us > 2 * rows["fast"].latency_us  # type: ignore[operator]


@pytest.mark.parametrize("arm", ["wrong", "nan"])
def test_a_wrong_arm_is_never_timed(arm: str) -> None:
    row = measured("fast", arm)[arm]

    assert row.status is Status.WRONG
    assert row.latency_us is None
    assert "passes 0.01" in row.reason


def test_an_arm_that_raises_is_failed_with_its_reason_on_one_line() -> None:
    row = measured("fast", "raises")["raises"]

    assert row.status is Status.FAILED
    assert row.latency_us is None
    assert row.reason == "RuntimeError: the kernel says no"


def test_a_failing_arm_does_not_keep_the_others_from_being_timed() -> None:
    rows = measured("raises", "nan", "fast")

    assert rows["fast"].status is Status.OK


def test_all_arms_may_fail() -> None:
    assert {row.status for row in measured("raises", "wrong").values()} == {
        Status.FAILED, Status.WRONG,
    }  # fmt: skip


class Slowed(CpuTimer):
    """A device that is slowed down for some rounds."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def sampler(self, run: Callable[[], torch.Tensor]) -> Callable[[], float]:
        return lambda: 1000.0 if self.left > 0 else 10.0

    def steady(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_what_was_timed_during_a_slowdown_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_tune.autotune.bench.timing._BACK_OFF_SECONDS", 0.0)
    row = measured("fast", timer=Slowed(2))["fast"]

    assert (row.latency_us, row.high_us) == (10.0, 10.0)
    assert row.discarded == 4


def test_a_device_that_stays_slowed_down_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_tune.autotune.bench.timing._BACK_OFF_SECONDS", 0.0)

    with pytest.raises(MachineUnfit, match="stays slowed down"):
        measured("fast", timer=Slowed(99))


class Wavering(CpuTimer):
    """A device whose clock never settles."""

    widest = 0.05

    def __init__(self, most_seconds: float = 60.0) -> None:
        self.most_seconds = most_seconds

    def sampler(self, run: Callable[[], torch.Tensor]) -> Callable[[], float]:
        times = cycle([10.0, 20.0])
        return lambda: next(times)


def test_a_noisy_arm_is_sampled_again_and_keeps_its_wide_interval() -> None:
    row = measured("fast", timer=Wavering())["fast"]

    assert row.status is Status.OK
    assert (row.low_us, row.high_us) == (10.0, 20.0)
    assert row.discarded == 4 * row.samples


def test_a_noisy_arm_is_not_sampled_again_when_its_time_is_used_up() -> None:
    row = measured("fast", timer=Wavering(most_seconds=0.0))["fast"]

    assert (row.low_us, row.high_us) == (10.0, 20.0)
    assert row.discarded == 0


def test_waiting_for_a_slowed_device_does_not_count_as_the_time_of_its_arms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nsa_tune.autotune.bench.timing._BACK_OFF_SECONDS", 0.02)

    class SlowedFirst(Wavering):
        slow = 2

        def steady(self) -> bool:
            self.slow -= 1
            return self.slow < 0

    row = measured("fast", timer=SlowedFirst(most_seconds=0.01))["fast"]

    assert row.discarded > 2 * 2, "also the samples of noisy attempts"


class Faulty(CpuTimer):
    """A fault that shows only when an arm is replayed."""

    def sampler(self, run: Callable[[], torch.Tensor]) -> Callable[[], float]:
        def sample() -> float:
            raise RuntimeError("an illegal address")

        return sample


def test_a_fault_while_timing_fails_the_arms_of_the_batch_and_not_the_run() -> None:
    rows = measured("fast", "slow", timer=Faulty())

    assert {row.status for row in rows.values()} == {Status.FAILED}
    assert rows["fast"].reason == "RuntimeError: an illegal address"


def test_inputs_that_do_not_fit_fail_every_arm() -> None:
    def case(batch: Batch, setting: Setting, device: torch.device) -> Case:
        raise MemoryError("no room")

    point = replace(runnable("fast", "slow"), case=case)
    rows = measure_batch(point, Batch.decode([1]), point.arms, SETTING, CPU, CpuTimer())

    assert [row.reason for row in rows] == ["MemoryError: no room"] * 2


class Scripted(CpuTimer):
    """A device on which a first layer takes these times in turn, and any other 10 us."""

    def __init__(self, first_us: list[float]) -> None:
        self.first_us = cycle(first_us)

    def sampler(self, run: Callable[[], torch.Tensor]) -> Callable[[], float]:
        return (lambda: next(self.first_us)) if run.__name__ == "first" else (lambda: 10.0)


def _first(case: Any) -> Callable[[], torch.Tensor]:
    def first() -> torch.Tensor:
        return torch.tensor([float(case.batch.q_tokens)])

    return first


def measured_with(
    build_first: Callable[[Any], Callable[[], torch.Tensor]], first_us: list[float]
) -> dict[str, Measurement]:
    """Two arms, the second of which has `build_first`."""
    point = runnable("fast", "slow")
    arms = (point.arms[0], replace(point.arms[1], first=build_first))
    timer = Scripted(first_us)
    rows = measure_batch(point, Batch.decode([10, 20]), arms, SETTING, CPU, timer)
    return {row.arm: row for row in rows}


def test_what_the_first_layer_takes_more_is_the_cost_of_a_pass() -> None:
    # A disturbance now and then does not move the median.
    rows = measured_with(_first, [30.0, 31.0, 29.0, 30.0, 900.0])

    assert rows["slow"].pass_us == 20.0
    assert rows["slow"].latency_us == 10.0
    assert rows["fast"].pass_us is None


def test_a_cost_of_a_pass_within_the_noise_is_none_at_all() -> None:
    assert measured_with(_first, [9.8])["slow"].pass_us == 0.0


def test_a_first_layer_that_fails_fails_its_arm_only() -> None:
    def failing(case: Any) -> Callable[[], torch.Tensor]:
        return ARMS["raises"](case)

    def not_built(case: Any) -> Callable[[], torch.Tensor]:
        raise RuntimeError("no schedule")

    rows = measured_with(failing, [30.0])
    assert (rows["slow"].status, rows["slow"].pass_us) == (Status.FAILED, None)
    assert rows["slow"].reason == "RuntimeError: the kernel says no"
    assert rows["fast"].status is Status.OK
    assert measured_with(not_built, [30.0])["slow"].reason == "RuntimeError: no schedule"
