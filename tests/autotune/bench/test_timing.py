"""Timing: arms in turns, each until its verdict is known; rounds in a slowdown are discarded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from nsa_tune.autotune.bench.race import LOOKS, MOST_SAMPLES
from nsa_tune.autotune.bench.timing import (
    CpuTimer,
    SlowedDown,
    Timer,
    interleave,
    layers_for,
    per_layer_us,
    timer_for,
)


@dataclass
class Recorded(Timer):
    """A fake device whose arms take given times; records the order in which they run."""

    most_seconds: float = 60.0
    order: list[str] = field(default_factory=list)
    slowed: list[bool] = field(default_factory=list)
    """Whether the device is slowed down after each round; steady after the last one."""
    protocol: str = "made-up/1"
    widest: float = 1.0

    def arm(self, name: str, *times: float) -> Callable[[], float]:
        taken = iter(times * 1000)

        def sample() -> float:
            self.order.append(name)
            return next(taken)

        return sample

    def sampler(self, run: Callable[[], torch.Tensor]) -> Callable[[], float]:
        return self.arm(str(run))

    def warm_up(self, samplers: Sequence[Callable[[], float]]) -> None:
        self.order.append("warm-up")

    def steady(self) -> bool:
        return not (self.slowed and self.slowed.pop(0))


@pytest.fixture(autouse=True)
def _no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_tune.autotune.bench.timing._BACK_OFF_SECONDS", 0.0)


def test_arms_run_forward_then_in_reverse() -> None:
    device = Recorded()
    interleave([device.arm("a", 1.0), device.arm("b", 1.1), device.arm("c", 1.2)], device)

    assert device.order[:13] == ["warm-up", *"abccba", *"abccba"]


def test_steady_arms_leave_at_the_first_look() -> None:
    device = Recorded()
    timings = interleave([device.arm("a", 1.0), device.arm("b", 1.2)], device)

    assert [timing.samples for timing in timings] == [LOOKS[0]] * 2
    assert [timing.median_us for timing in timings] == [1.0, 1.2]


def test_a_far_slower_arm_is_not_run_again() -> None:
    device = Recorded()
    interleave([device.arm("a", 1.0), device.arm("b", 4.0), device.arm("c", 1.1)], device)

    assert device.order[:9] == ["warm-up", *"abccba", *"ac"]
    assert device.order.count("b") == 2


def test_a_disturbance_of_a_far_slower_arm_costs_one_more_round() -> None:
    device = Recorded(widest=0.05)
    timings = interleave([device.arm("a", 1.0), device.arm("b", 9.0, 25.0, 9.0, 9.0)], device)

    assert device.order.count("b") == 4
    assert [timing.discarded for timing in timings] == [0, 0]


def test_the_noise_of_a_far_slower_arm_does_not_repeat_the_race() -> None:
    device = Recorded(widest=0.05)
    timings = interleave([device.arm("a", 1.0), device.arm("b", 1000.0, 2500.0)], device)

    assert device.order.count("b") == LOOKS[0]
    assert [timing.discarded for timing in timings] == [0, 0]


def test_noisy_arms_get_the_most_samples() -> None:
    device = Recorded()
    timings = interleave([device.arm("a", 1.0, 1.5, 1.5), device.arm("b", 1.1, 1.4, 1.6)], device)

    assert [timing.samples for timing in timings] == [MOST_SAMPLES] * 2


def test_a_race_ends_after_the_fewest_samples_when_the_time_is_used_up() -> None:
    device = Recorded(most_seconds=0.0)
    timings = interleave([device.arm("a", 1.0, 1.5)], device)

    assert timings[0].samples == LOOKS[0]


def test_a_round_during_a_slowdown_is_discarded_counted_and_repeated() -> None:
    device = Recorded(slowed=[False, True, True, False])
    times = [1.0, 1.0, *[9.0] * 4, *[1.0] * 6]
    timings = interleave([device.arm("a", *times)], device)

    assert (timings[0].median_us, timings[0].high_us) == (1.0, 1.0)
    assert (timings[0].samples, timings[0].discarded) == (LOOKS[0], 4)
    assert device.order.count("warm-up") == 3


def test_a_device_that_stays_slowed_down_is_unfit() -> None:
    device = Recorded(slowed=[True] * 99)

    with pytest.raises(SlowedDown, match="stays slowed down"):
        interleave([device.arm("a", 1.0)], device)


def test_samples_that_disagree_are_repeated_and_counted() -> None:
    """A clock that climbs during the first attempt."""
    device = Recorded(widest=0.05)
    times = [2.0 - i / MOST_SAMPLES for i in range(MOST_SAMPLES)] + [1.0] * MOST_SAMPLES
    timing = interleave([device.arm("a", *times)], device)[0]

    assert (timing.low_us, timing.high_us) == (1.0, 1.0)
    assert timing.discarded == MOST_SAMPLES


@pytest.mark.parametrize(
    ("time_us", "layers"), [(5000.0, 1), (1000.0, 1), (999.0, 2), (300.0, 4), (130.0, 8), (0.1, 8)]
)
def test_a_short_arm_is_timed_as_several_layers(time_us: float, layers: int) -> None:
    assert layers_for(time_us) == layers


@pytest.mark.parametrize(
    ("time_us", "layers", "us"),
    [(2000.0, 1, 2000.0), (40.0, 8, 5.0), (0.4, 8, 0.1), (-1.0, 2, 0.1)],
)
def test_a_layer_takes_its_part_and_never_nothing(time_us: float, layers: int, us: float) -> None:
    """The flushes that are subtracted may have taken longer than they did within the sample."""
    assert per_layer_us(time_us, layers) == us


def test_a_cpu_has_another_protocol() -> None:
    timer = timer_for(torch.device("cpu"))

    assert isinstance(timer, CpuTimer)
    assert timer.protocol == "cpu-clock/1"
    assert timer.steady()


def test_a_cpu_sampler_runs_the_arm_once_a_sample() -> None:
    runs: list[int] = []

    def run() -> torch.Tensor:
        runs.append(1)
        return torch.zeros(1)

    timer = CpuTimer()
    assert timer.first(run).tolist() == [0.0]
    sample = timer.sampler(run)
    assert len(runs) == 1
    assert sample() > 0
    assert len(runs) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_keeps_its_arm_s_tensors_alive() -> None:
    from nsa_tune.autotune.bench.timing import CudaTimer

    device = torch.device("cuda:0")
    timer = CudaTimer(device)
    target = torch.zeros(1 << 20, device=device)

    def arm() -> Callable[[], torch.Tensor]:
        source = torch.full((1 << 20,), 3.0, device=device)
        return lambda: target.copy_(source * 2)

    run = arm()
    timer.first(run)
    sample = timer.sampler(run)
    del run
    torch.cuda.empty_cache()
    scratch = torch.zeros(1 << 20, device=device)
    target.zero_()

    assert sample() > 0
    assert (target == 6.0).all()
    assert (scratch == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sample_of_a_short_arm_is_eight_layers_and_one_before_them() -> None:
    from nsa_tune.autotune.bench.timing import CudaTimer

    timer = CudaTimer(torch.device("cuda:0"))
    layers = torch.zeros(1, device="cuda:0")

    def run() -> torch.Tensor:
        return layers.add_(1)

    timer.first(run)
    sample = timer.sampler(run)
    layers.zero_()
    sample()

    assert layers.item() == 9
