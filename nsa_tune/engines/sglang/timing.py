"""Timing SGLang's and nsa-tune's way to do the same work, when an engine starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

_LAUNCHES, _ROUNDS = 4, 3
_AHEAD_CYCLES = 500_000
"""The device waits so long before a measurement, so that the host's launches are ahead of it."""
_HOST_LAUNCHES = 15


def gains(engine_us: float, own_us: float, more_host_us: float, *, part: float) -> bool:
    """Whether nsa-tune's way takes less than `part` of the time of SGLang's.

    A pass of few tokens waits for its host, and the host launches a Triton kernel later than one of
    C++. So what it launches later counts as if the GPU waited for it.
    """
    return own_us + max(more_host_us, 0.0) < part * engine_us


def timed_us(
    ways: Sequence[Callable[[], Any]], launches: int = _LAUNCHES, rounds: int = _ROUNDS
) -> list[float]:
    """GPU time of one call of each way in microseconds: the least of some rounds by turns."""
    import torch

    found = [float("inf")] * len(ways)
    for number in range(rounds + 1):
        for i, way in enumerate(ways):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_AHEAD_CYCLES)
            begin.record()
            for _ in range(launches):
                way()
            end.record()
            end.synchronize()
            if number:  # the first round warms up
                found[i] = min(found[i], begin.elapsed_time(end) * 1e3 / launches)
    return found


def more_launched_us(engine: Callable[[], Any], own: Callable[[], Any]) -> float:
    """How many microseconds longer the host takes to launch `own` than `engine`: the medians of
    some launches by turns, which do not wait for the device."""
    import torch

    torch.cuda.synchronize()
    took_us: tuple[list[float], list[float]] = ([], [])
    for _ in range(_HOST_LAUNCHES):
        for way, times_us in zip((engine, own), took_us, strict=True):
            begin = perf_counter()
            way()
            times_us.append((perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return median(took_us[1]) - median(took_us[0])
