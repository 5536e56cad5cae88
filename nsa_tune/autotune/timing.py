"""Timing protocols: how one launch of an arm becomes one number of microseconds.

The protocol's name is part of a table's key, because numbers of two protocols do not compare.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, sqrt
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import Protocol

import torch

from nsa_tune.backend import nvml

__all__ = ["CpuTimer", "CudaTimer", "Timer", "Timing", "interleave", "protocol_of", "timer_for"]

Run = Callable[[], torch.Tensor]
Sampler = Callable[[], float]

TARGET_HALF_WIDTH = 0.005
"""Stop when every arm's interval is within this of its median."""
FEWEST_ROUNDS = 4
MOST_ROUNDS = 20
_MOST_RESERVED = 0.4
_IDLE_SECONDS = 0.3
_WARM_UP_SECONDS = 0.1
_LOWEST_CLOCK = 0.6
"""Of the highest clock. Full load under the power cap stays well above."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one arm, summed up. Microseconds."""

    median_us: float
    low_us: float
    high_us: float
    samples: int

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Timing:
        """Median and its distribution-free 95 % interval, from the order statistics."""
        ordered = sorted(samples_us)
        count = len(ordered)
        # Ranks n/2 -+ 0.98 sqrt(n): the normal approximation of the binomial.
        reach = 0.98 * sqrt(count)
        low = max(floor(count / 2 - reach) - 1, 0)
        return cls(median(ordered), ordered[low], ordered[count - 1 - low], count)

    @property
    def half_width(self) -> float:
        """Half of the interval, relative to the median."""
        return (self.high_us - self.low_us) / (2 * self.median_us)


class Timer(Protocol):
    """One protocol on one device."""

    protocol: str
    most_seconds: float
    """Time for one arm, after which `FEWEST_ROUNDS` are enough."""
    widest: float
    """A half width above this means that the clock changed meanwhile."""

    def sampler(self, run: Run) -> Sampler:
        """Prepare an arm; each call of the result launches it once and returns microseconds."""
        ...

    def warm_up(self, samplers: Sequence[Sampler]) -> None:
        """Bring the device to the clock that the samples will be taken at."""
        ...

    def release(self) -> None:
        """Called between batches, when no sampler is alive."""
        ...

    def steady(self) -> bool:
        """False while the device is slowed down, so that what was just timed is worth nothing."""
        ...


class CudaTimer:
    """CUDA graph, replayed behind an L2 flush, timed by events.

    A graph holds launches only, so the host's overhead is in no sample. The flush before the
    first event also keeps the GPU busy while the host queues the replay behind it.
    """

    protocol = "cuda-graph/1"
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

    def sampler(self, run: Run) -> Sampler:
        """Warm `run` up, capture it, and return what replays it once."""
        self._clocked_down |= perf_counter() - self._latest > _IDLE_SECONDS
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
            self._stream.synchronize()
        graph = self._capture(run)

        def sample(_keep: Run = run) -> float:
            # The graph holds addresses, not tensors: what `run` closes over must outlive it.
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
        """Keep a GPU that was idle busy for a while: it clocks down, during a compile for one."""
        self._clocked_down |= perf_counter() - self._latest > _IDLE_SECONDS
        if not self._clocked_down:
            return
        end = perf_counter() + _WARM_UP_SECONDS
        while perf_counter() < end:
            for sample in samplers:
                sample()
        self._clocked_down = False

    def _share_a_pool(self) -> None:
        # Graphs that are replayed one after the other may share their memory. The pool lives as
        # long as one graph that uses it, so an empty-handed one stays.
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper = self._capture(lambda: torch.zeros(1, device=self._device))

    def release(self) -> None:
        """Give memory back before it is short; after every batch it would cost more than timing.

        Batches of many sizes leave holes in the pool that no later graph fits into.
        """
        total = torch.cuda.get_device_properties(self._device).total_memory
        if torch.cuda.memory_reserved(self._device) > _MOST_RESERVED * total:
            self._share_a_pool()
            gc.collect()
            torch.cuda.empty_cache()

    def steady(self) -> bool:
        """Whether the driver reports no slowdown and a clock near the usual one."""
        state = nvml.gpu_state(self._uuid)
        if state is None:
            return True
        return not state.unsteady and state.sm_clock_mhz >= _LOWEST_CLOCK * state.sm_clock_max_mhz

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
    """A monotonic clock around the call, warm caches: a CPU's table is for a CPU."""

    protocol = "cpu-clock/1"
    most_seconds = 0.05
    widest = float("inf")

    def sampler(self, run: Run) -> Sampler:
        """Warm `run` up and return what calls it once."""
        run()

        def sample() -> float:
            start = perf_counter_ns()
            run()
            return (perf_counter_ns() - start) / 1e3

        return sample

    def warm_up(self, samplers: Sequence[Sampler]) -> None:
        """Each sampler has run once already."""

    def release(self) -> None:
        """Nothing is held."""

    def steady(self) -> bool:
        """Nobody tells: a CPU's samples are taken as they come."""
        return True


def protocol_of(device: torch.device) -> str:
    """The name of the protocol of `device`, without starting it."""
    return CudaTimer.protocol if device.type == "cuda" else CpuTimer.protocol


def timer_for(device: torch.device) -> Timer:
    """The protocol of `device`."""
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def interleave(samplers: Sequence[Sampler], timer: Timer) -> list[Timing]:
    """Time arms against each other, each round once forward and once in reverse.

    Drift of the clock then falls on all arms alike. Ends when all intervals are narrow, after
    `MOST_ROUNDS`, or when the time is used up and every arm has its fewest samples.
    """
    samples: list[list[float]] = [[] for _ in samplers]
    numbered = list(enumerate(samplers))
    timer.warm_up(samplers)
    end = perf_counter() + timer.most_seconds * len(samplers)
    for done in range(1, MOST_ROUNDS + 1):
        for order in (numbered, numbered[::-1]):
            for i, sample in order:
                samples[i].append(sample())
        if done < FEWEST_ROUNDS:
            continue
        timings = [Timing.of(values) for values in samples]
        if perf_counter() > end or all(t.half_width <= TARGET_HALF_WIDTH for t in timings):
            break
    return [Timing.of(values) for values in samples]
