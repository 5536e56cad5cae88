"""Timing protocols: how launches of arms become microseconds.

A protocol's name is part of a table's key, because times of two protocols cannot be compared.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter, perf_counter_ns, sleep
from typing import Protocol

import torch

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.bench.intervals import Timing
from nsa_tune.autotune.bench.race import FAR, LOOKS, Race
from nsa_tune.backend.hardware import nvml

__all__ = [
    "CpuTimer", "CudaTimer", "SlowedDown", "Timer", "Timing", "interleave", "protocol_of",
    "timer_for",
]  # fmt: skip

_log = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]
"""Launches a whole arm and returns its output."""
Sampler = Callable[[], float]
"""Launches an arm once and returns its time in microseconds."""

_MOST_RESERVED = 0.4
"""Share of a GPU's memory that torch may keep reserved between batches."""
_IDLE_SECONDS = 0.3
"""A GPU that was idle for so long may have clocked down."""
_WARM_UP_SECONDS = 0.1
_LOWEST_CLOCK = 0.6
"""Below this share of the highest clock a GPU counts as slowed down. A GPU at its power cap stays
well above."""
_SLOWDOWNS = 5
"""Rounds in a row that may be discarded for a slowdown before the device counts as unfit."""
_ATTEMPTS = 5
"""Races of the same arms, when the clock was not steady."""
_BACK_OFF_SECONDS = 0.5
"""Pause after a slowdown; the n-th in a row takes n times as long."""


class SlowedDown(MachineUnfit):
    """The device stays slowed down: times taken now would not hold later."""

    def __init__(self) -> None:
        super().__init__(
            "the GPU stays slowed down (heat, power or another process), and times taken now would "
            "not hold later; see nsa-tune doctor, and run the same command again to continue"
        )


class Timer(Protocol):
    """A timing protocol on one device."""

    protocol: str
    most_seconds: float
    """Seconds for each arm. After them a race ends as soon as each arm has 8 samples."""
    widest: float
    """A relative half width above this means that the device's clock changed during the race."""

    def first(self, run: Run) -> torch.Tensor:
        """Run an arm for the first time, on the stream that samples it: it may compile or allocate
        here. Returns its output."""
        ...

    def sampler(self, run: Run) -> Sampler:
        """Prepare to time an arm that `first` has run."""
        ...

    def warm_up(self, samplers: Sequence[Sampler]) -> None:
        """Bring the device up to its clock under load."""
        ...

    def release(self) -> None:
        """Free memory between batches, when no sampler is alive."""
        ...

    def steady(self) -> bool:
        """False while the device is slowed down: the samples just taken are to be discarded."""
        ...


class CudaTimer:
    """Replays a CUDA graph of the arm after an L2 flush, and times the replay by events.

    A graph holds only the GPU's work, so host overhead is in no sample. The flush before the first
    event also keeps the GPU busy while the host queues the replay.
    """

    protocol = "cuda-graph/2"
    most_seconds = 0.3
    widest = 0.05

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * l2, dtype=torch.uint8, device=device)
        self._device = device
        self._latest = 0.0
        self._clocked_down = True
        self._share_a_pool()

    def first(self, run: Run) -> torch.Tensor:
        """Run on the stream that is captured later, and wait until the GPU has finished."""
        self._clocked_down |= perf_counter() - self._latest > _IDLE_SECONDS
        # The inputs were written on the current stream: wait for it.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            output = run()
            self._stream.synchronize()
        return output

    def sampler(self, run: Run) -> Sampler:
        """Capture `run`; the sampler replays the graph once."""
        graph = self._capture(run)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def sample(_keep: Run = run) -> float:
            # The graph holds addresses only: `_keep` keeps alive the tensors that `run` refers to.
            with torch.cuda.stream(self._stream):
                self._flush.zero_()
                start.record()
                graph.replay()
                stop.record()
            stop.synchronize()
            self._latest = perf_counter()
            return float(start.elapsed_time(stop)) * 1e3

        sample()
        return sample

    def warm_up(self, samplers: Sequence[Sampler]) -> None:
        """Keep a GPU busy for 0.1 s if it was idle, as during a compilation: it clocked down."""
        self._clocked_down |= perf_counter() - self._latest > _IDLE_SECONDS
        if not self._clocked_down:
            return
        end = perf_counter() + _WARM_UP_SECONDS
        while perf_counter() < end:
            for sample in samplers:
                sample()
        self._clocked_down = False

    def _share_a_pool(self) -> None:
        # Graphs that are replayed one after another may share a memory pool. A pool lives as long
        # as a graph uses it, so this small one stays alive between batches.
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper = self._capture(lambda: torch.zeros(1, device=self._device))

    def release(self) -> None:
        """Free the graphs' pool when torch has reserved 40 % of the memory.

        Batches of many sizes leave holes in the pool that no later graph fits into. Freeing it
        after every batch would take longer than the timing.
        """
        total = torch.cuda.get_device_properties(self._device).total_memory
        if torch.cuda.memory_reserved(self._device) > _MOST_RESERVED * total:
            self._share_a_pool()
            gc.collect()
            torch.cuda.empty_cache()

    def steady(self) -> bool:
        """Whether NVML reports no slowdown and a clock of at least 60 % of the highest."""
        clock = nvml.clock(self._uuid)
        if clock is None:
            return True
        return not clock.unsteady and clock.sm_mhz >= _LOWEST_CLOCK * clock.sm_max_mhz

    def _capture(self, run: Run) -> torch.cuda.CUDAGraph:
        """One launch of `run` as a graph.

        torch.cuda.graph() would collect garbage and empty the allocator's cache at each capture,
        which takes ten times as long as the timing.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                run()
            finally:
                graph.capture_end()
        return graph


class CpuTimer:
    """Reads a monotonic clock before and after the call, with warm caches."""

    protocol = "cpu-clock/1"
    most_seconds = 0.05
    widest = float("inf")

    def first(self, run: Run) -> torch.Tensor:
        """Run once."""
        return run()

    def sampler(self, run: Run) -> Sampler:
        """The sampler calls `run` once."""

        def sample() -> float:
            start = perf_counter_ns()
            run()
            return (perf_counter_ns() - start) / 1e3

        return sample

    def warm_up(self, samplers: Sequence[Sampler]) -> None:
        """Nothing to do: every arm has run once already."""

    def release(self) -> None:
        """Nothing to free."""

    def steady(self) -> bool:
        """Always: nothing reports a CPU's slowdowns."""
        return True


def protocol_of(device: torch.device) -> str:
    """The name of the timing protocol of `device`, without creating a timer."""
    return CudaTimer.protocol if device.type == "cuda" else CpuTimer.protocol


def timer_for(device: torch.device) -> Timer:
    """A timer for `device`, by its timing protocol."""
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def interleave(samplers: Sequence[Sampler], timer: Timer) -> list[Timing]:
    """Time arms in turns until each is known slower than the fastest or equal, or time is up.

    A clock that still climbs after a pause shows in no counter of the driver, only in samples that
    disagree. The race is then run again, as long as the arms' time allows. After the last attempt
    a noisy arm keeps its wide interval: at the power cap the clock never settles.

    Returns:
        A `Timing` for each sampler, in their order.

    Raises:
        SlowedDown: when the device stays slowed down.
    """
    discarded = [0] * len(samplers)
    left_us = timer.most_seconds * len(samplers) * 1e6
    for attempt in range(1, _ATTEMPTS + 1):
        timings = _run_race(samplers, timer, discarded).timings()
        # Time in the arms themselves: pauses after a slowdown do not count.
        took_us = sum(one.median_us * one.samples for one in timings)
        left_us -= took_us
        near = FAR[LOOKS[0] - 2] * min((one.median_us for one in timings), default=0.0)
        # An arm far behind the fastest may be noisy by itself.
        climbed = any(
            one.samples >= LOOKS[0] and one.half_width > timer.widest and one.low_us < near
            for one in timings
        )
        if attempt == _ATTEMPTS or not climbed or left_us < took_us:
            break
        _log.info("attempt %d is discarded: the device's clock was not steady", attempt)
        discarded = [n + one.samples for n, one in zip(discarded, timings, strict=True)]
    return [replace(one, discarded=n) for one, n in zip(timings, discarded, strict=True)]


def _run_race(samplers: Sequence[Sampler], timer: Timer, discarded: list[int]) -> Race:
    """Run one race. A round samples the arms forward and in reverse, so drift hits all alike.

    A round during which the device slowed down is repeated; `discarded` counts its samples by arm.
    """
    race = Race(len(samplers))
    timer.warm_up(samplers)
    end = perf_counter() + timer.most_seconds * len(samplers)
    slowdowns = 0
    while order := race.active:
        forward = [samplers[arm]() for arm in order]
        back = [samplers[arm]() for arm in reversed(order)]
        if not timer.steady():
            slowdowns += 1
            for arm in order:
                discarded[arm] += 2
            if slowdowns > _SLOWDOWNS:
                raise SlowedDown
            _log.info("a round is discarded, the device is slowed down")
            sleep(_BACK_OFF_SECONDS * slowdowns)
            timer.warm_up(samplers)
            continue
        slowdowns = 0
        race.add(dict(zip(order, zip(forward, reversed(back), strict=True), strict=True)))
        if perf_counter() > end and race.taken >= LOOKS[0]:
            race.stop()
    return race
