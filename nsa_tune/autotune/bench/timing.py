"""Timing protocols: how launches of arms become microseconds.

A protocol's name is part of a table's key, because times of two protocols cannot be compared.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter, perf_counter_ns, sleep
from typing import Protocol

import torch

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.bench.intervals import Timing
from nsa_tune.autotune.bench.race import FAR, LOOKS, Race
from nsa_tune.backend.hardware import nvml

_log = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]
"""Launches a whole arm and returns its output."""
Launch = Callable[[], object]
"""Launches work; what it returns is ignored."""
Sampler = Callable[[], float]
"""Launches an arm, once or as several layers, and returns the microseconds of one."""

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
_LAYERS_US = 1000.0
"""An arm that takes less is timed as 2, 4 or 8 layers of a pass: as few as take this long together,
or 8."""
_MOST_LAYERS = 8
_FLUSH_REPLAYS = 9
"""Timed replays of the flushes alone."""
_LEAST_US = 0.1
"""The least time of a layer: that of the flushes may vary by more than a short arm takes."""
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
    """A timing protocol on one device. What one has nothing to do for, it inherits."""

    protocol: str
    most_seconds: float
    """Seconds for each arm. After them a race ends as soon as each arm has 8 samples."""
    widest: float
    """A relative half width above this means that the device's clock changed during the race."""

    def first(self, run: Run) -> torch.Tensor:
        """Run an arm for the first time, on the stream that samples it: it may compile or allocate
        here. Returns its output."""
        return run()

    def sampler(self, run: Run) -> Sampler:
        """Prepare to time an arm that `first` has run."""

    def warm_up(self, samplers: Sequence[Sampler]) -> None:
        """Bring the device up to its clock under load."""
        return

    def release(self) -> None:
        """Free memory between batches, when no sampler is alive."""
        return

    def steady(self) -> bool:
        """False while the device is slowed down: the samples just taken are to be discarded."""
        return True


class CudaTimer(Timer):
    """Replays a CUDA graph of a pass's layers, each after an L2 flush, and times it by events.

    A graph holds only the GPU's work, so host overhead is in no sample. What starting a graph and
    the flushes take is timed by itself and subtracted, so that an arm costs what it costs in the
    middle of a pass. A flush or a layer before the first event keeps the GPU busy while the host
    queues.
    """

    protocol = "cuda-graph/3"
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
        self._flushes_us: dict[int, float] = {}
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
        """Capture as many layers of `run` as its time asks for; the sampler replays them once and
        gives the time of one."""
        layer = self._captured(run, 1)
        alone = self._timed(layer, self._flushes(1))
        layers = layers_for(min(alone() for _ in range(2)))
        if layers == 1:
            return lambda: per_layer_us(alone(), 1)
        # An untimed layer before them loads the instructions.
        many = self._timed(self._captured(run, layers), self._flushes(layers), before=layer)
        return lambda: per_layer_us(many(), layers)

    def _flushes(self, count: int) -> float:
        """Microseconds of a graph of so many flushes; measured once."""
        if count not in self._flushes_us:
            replay = self._timed(self._captured(None, count))
            # The first arm's compilation may have left the GPU idle.
            self._clocked_down = True
            self.warm_up([replay])
            self._flushes_us[count] = median(replay() for _ in range(_FLUSH_REPLAYS))
        return self._flushes_us[count]

    def _timed(
        self, graph: Launch, flushes_us: float = 0.0, before: Launch | None = None
    ) -> Sampler:
        """Of replays of `graph`, without the flushes in it; warm. `before` keeps the GPU busy
        while the host queues the replay: a flush unless it is given."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = before or self._flush.zero_

        def sample() -> float:
            with torch.cuda.stream(self._stream):
                before()
                start.record()
                graph()
                stop.record()
            stop.synchronize()
            self._latest = perf_counter()
            return float(start.elapsed_time(stop)) * 1e3 - flushes_us

        sample()
        return sample

    def _captured(self, run: Run | None, layers: int) -> Launch:
        def every() -> None:
            for _ in range(layers):
                self._flush.zero_()
                if run is not None:
                    run()

        graph = self._capture(every)

        # The graph holds addresses only: `_keep` keeps alive the tensors that `run` refers to.
        def replay(_keep: Run | None = run) -> None:
            graph.replay()

        return replay

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

    def _capture(self, run: Launch) -> torch.cuda.CUDAGraph:
        """What `run` launches as a graph.

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


class CpuTimer(Timer):
    """Reads a monotonic clock before and after the call, with warm caches. Nothing reports a CPU's
    slowdowns."""

    protocol = "cpu-clock/1"
    most_seconds = 0.05
    widest = float("inf")

    def sampler(self, run: Run) -> Sampler:
        """The sampler calls `run` once."""

        def sample() -> float:
            start = perf_counter_ns()
            run()
            return (perf_counter_ns() - start) / 1e3

        return sample


def layers_for(time_us: float) -> int:
    """As how many layers of a pass an arm of so many microseconds is timed."""
    layers = 1
    while layers < _MOST_LAYERS and layers * time_us < _LAYERS_US:
        layers *= 2
    return layers


def per_layer_us(time_us: float, layers: int) -> float:
    """One layer's part of `time_us`, which are the layers' without the flushes."""
    return max(time_us / layers, _LEAST_US)


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
        took_us = sum(timing.median_us * timing.samples for timing in timings)
        left_us -= took_us
        near = FAR[LOOKS[0] - 2] * min((timing.median_us for timing in timings), default=0.0)
        # An arm far behind the fastest may be noisy by itself.
        climbed = any(
            timing.samples >= LOOKS[0] and timing.half_width > timer.widest and timing.low_us < near
            for timing in timings
        )
        if attempt == _ATTEMPTS or not climbed or left_us < took_us:
            break
        _log.info("attempt %d is discarded: the device's clock was not steady", attempt)
        discarded = [n + timing.samples for n, timing in zip(discarded, timings, strict=True)]
    return [replace(timing, discarded=n) for timing, n in zip(timings, discarded, strict=True)]


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
