"""Timing: medians with honest intervals, arms interleaved, stopped when the interval is narrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.autotune.timing import (
    FEWEST_ROUNDS,
    MOST_ROUNDS,
    CpuTimer,
    Timing,
    interleave,
    timer_for,
)

latencies = st.lists(st.floats(1, 1e6), min_size=8, max_size=60)


@given(latencies)
def test_the_interval_holds_the_median_and_lies_within_the_samples(samples: list[float]) -> None:
    timing = Timing.of(samples)

    assert timing.median_us == median(samples)
    assert min(samples) <= timing.low_us <= timing.median_us <= timing.high_us <= max(samples)
    assert timing.samples == len(samples)


def test_the_interval_of_many_samples_leaves_the_outliers_out() -> None:
    timing = Timing.of([100.0] * 38 + [1.0, 9000.0])

    assert (timing.low_us, timing.high_us) == (100.0, 100.0)


def test_the_interval_covers_the_true_median_19_times_in_20() -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(2000, 16, generator=generator).tolist()
    timings = [Timing.of([100 + x for x in row]) for row in drawn]
    covered = sum(timing.low_us <= 100 <= timing.high_us for timing in timings)

    assert 0.94 < covered / len(timings) < 0.99


@dataclass
class Recorded:
    """A device whose arms take made-up times; remembers who ran when."""

    most_seconds: float = 60.0
    order: list[str] = field(default_factory=list)
    protocol: str = "made-up/1"
    widest: float = 1.0

    def arm(self, name: str, *times: float) -> Callable[[], float]:
        taken = iter(times * 1000)

        def sample() -> float:
            self.order.append(name)
            return next(taken)

        return sample

    def sampler(self, run: Callable[[], torch.Tensor]) -> Callable[[], float]:
        raise NotImplementedError

    def warm_up(self, samplers: Sequence[Callable[[], float]]) -> None:
        self.order.append("warm-up")

    def release(self) -> None:
        raise NotImplementedError

    def steady(self) -> bool:
        return True


def test_arms_run_forward_then_in_reverse() -> None:
    device = Recorded()
    interleave([device.arm("a", 1.0), device.arm("b", 2.0), device.arm("c", 3.0)], device)

    assert device.order[:13] == ["warm-up", *"abccba", *"abccba"]


def test_steady_arms_are_done_after_the_fewest_rounds() -> None:
    device = Recorded()
    timings = interleave([device.arm("a", 1.0), device.arm("b", 2.0)], device)

    assert [timing.samples for timing in timings] == [2 * FEWEST_ROUNDS] * 2
    assert [timing.median_us for timing in timings] == [1.0, 2.0]


def test_one_noisy_arm_keeps_all_of_them_going_up_to_the_cap() -> None:
    device = Recorded()
    timings = interleave([device.arm("a", 1.0, 1.5), device.arm("b", 2.0)], device)

    assert [timing.samples for timing in timings] == [2 * MOST_ROUNDS] * 2


def test_no_more_than_the_fewest_rounds_when_the_time_is_used_up() -> None:
    device = Recorded(most_seconds=0.0)
    timings = interleave([device.arm("a", 1.0, 1.5)], device)

    assert timings[0].samples == 2 * FEWEST_ROUNDS


def test_a_cpu_has_a_protocol_of_its_own() -> None:
    timer = timer_for(torch.device("cpu"))

    assert isinstance(timer, CpuTimer)
    assert timer.protocol == "cpu-clock/1"
    assert timer.steady()


def test_a_cpu_sampler_runs_the_arm_once_a_sample_and_once_to_warm_up() -> None:
    runs: list[int] = []

    def run() -> torch.Tensor:
        runs.append(1)
        return torch.zeros(1)

    sample = CpuTimer().sampler(run)
    assert len(runs) == 1
    assert sample() > 0
    assert len(runs) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_keeps_what_its_arm_closes_over_alive() -> None:
    from nsa_tune.autotune.timing import CudaTimer

    device = torch.device("cuda:0")
    timer = CudaTimer(device)
    target = torch.zeros(1 << 20, device=device)

    def arm() -> Callable[[], torch.Tensor]:
        source = torch.full((1 << 20,), 3.0, device=device)
        return lambda: target.copy_(source * 2)

    sample = timer.sampler(arm())
    torch.cuda.empty_cache()
    scratch = torch.zeros(1 << 20, device=device)
    target.zero_()

    assert sample() > 0
    assert (target == 6.0).all()
    assert (scratch == 0).all()
