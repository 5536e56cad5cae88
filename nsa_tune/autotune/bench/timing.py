"""Timing protocols: how one launch of an arm becomes one number of microseconds.

The protocol's name is part of a table's key, because numbers of two protocols do not compare.
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
from nsa_tune.autotune.bench.sequential import FAR, LOOKS, Contest
from nsa_tune.backend.hardware import nvml

__all__ = [
    "CpuTimer", "CudaTimer", "SlowedDown", "Timer", "Timing", "interleave", "protocol_of",
    "timer_for",
]  # fmt: skip

_log = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]
Sampler = Callable[[], float]

_MOST_RESERVED = 0.4
_IDLE_SECONDS = 0.3
_WARM_UP_SECONDS = 0.1
_LOWEST_CLOCK = 0.6
"""Of the highest clock. Full load under the power cap stays well above."""
_SLOWDOWNS = 5
"""Rounds in a row that may be lost to a slowdown before the device counts as unfit."""
_ATTEMPTS = 5
_BACK_OFF_SECONDS = 0.5


class SlowedDown(MachineUnfit):
    """The device stays slowed down, so that nothing it is timed at would hold."""

    def __init__(self) -> None:
        super().__init__(
            "the GPU stays slowed down (heat, power or another process), so nothing it is timed at "
            "would hold; see nsa-tune doctor, and run the same command again to continue"
        )


class Timer(Protocol):
    """One protocol on one device."""

    protocol: str
    most_seconds: float
    """Time for one arm, after which its fewest samples are enough."""
    widest: float
    """A half width above this means that the clock changed meanwhile."""

    def first(self, run: Run) -> torch.Tensor:
        """Run an arm once, where its samples will be taken: what is made once is made now."""
        ...

    def sampler(self, run: Run) -> Sampler:
        """Prepare an arm that has run; each call of the result launches it once and returns
        microseconds."""
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

    def first(self, run: Run) -> torch.Tensor:
        """Run on the stream that is captured later; returns when the GPU has finished."""
        self._clocked_down |= perf_counter() - self._latest > _IDLE_SECONDS
        # The inputs were made on the stream that is current here.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            output = run()
            self._stream.synchronize()
        return output

    def sampler(self, run: Run) -> Sampler:
        """Capture `run`, and return what replays it once."""
        graph = self._capture(run)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def sample(_keep: Run = run) -> float:
            # The graph holds addresses, not tensors: what `run` closes over must outlive it.
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
    """A monotonic clock around the call, warm caches: a CPU's table is for a CPU."""

    protocol = "cpu-clock/1"
    most_seconds = 0.05
    widest = float("inf")

    def first(self, run: Run) -> torch.Tensor:
        """Run once."""
        return run()

    def sampler(self, run: Run) -> Sampler:
        """What calls `run` once."""

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
    """Time arms against each other until each is known to be slower, equal, or beyond telling.

    A clock that climbs after a pause leaves no trace in the driver's counters, only samples that
    disagree: they are taken again, as long as that fits into the time that arms may take. An arm
    that is noisy at every attempt is kept with the interval that it has: at the power cap the
    clock wavers.

    Raises:
        SlowedDown: when the device stays slowed down.
    """
    discarded = [0] * len(samplers)
    left_us = timer.most_seconds * len(samplers) * 1e6
    for attempt in range(1, _ATTEMPTS + 1):
        timings = _compare(samplers, timer, discarded).timings()
        # What the arms themselves took: waiting for the device to recover is no sampling.
        took_us = sum(one.median_us * one.samples for one in timings)
        left_us -= took_us
        near = FAR[LOOKS[0] - 2] * min((one.median_us for one in timings), default=0.0)
        # Of an arm far behind its noise says nothing of the clock.
        climbed = any(
            one.samples >= LOOKS[0] and one.half_width > timer.widest and one.low_us < near
            for one in timings
        )
        if attempt == _ATTEMPTS or not climbed or left_us < took_us:
            break
        _log.info("attempt %d is discarded, the device's clock was not steady", attempt)
        discarded = [n + one.samples for n, one in zip(discarded, timings, strict=True)]
    return [replace(one, discarded=n) for one, n in zip(timings, discarded, strict=True)]


def _compare(samplers: Sequence[Sampler], timer: Timer, discarded: list[int]) -> Contest:
    """One contest, each round once forward and once in reverse: drift falls on all arms alike.

    Samples of a round after which the device is slowed down are counted in `discarded`.
    """
    contest = Contest(len(samplers))
    timer.warm_up(samplers)
    end = perf_counter() + timer.most_seconds * len(samplers)
    slowdowns = 0
    while order := contest.active:
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
        contest.add(dict(zip(order, zip(forward, reversed(back), strict=True), strict=True)))
        if perf_counter() > end and contest.taken >= LOOKS[0]:
            contest.stop()
    return contest
