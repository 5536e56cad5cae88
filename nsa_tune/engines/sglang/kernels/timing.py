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
_CAPTURED_CALLS, _REPLAYS = 16, 5


def timed_us(ways: Sequence[Callable[[], Any]]) -> list[float]:
    """GPU time of one call of each way in microseconds: the least of some rounds by turns."""
    import torch

    def launched(way: Callable[[], Any]) -> Callable[[], None]:
        def launch() -> None:
            for _ in range(_LAUNCHES):
                way()

        return launch

    def ahead() -> None:
        torch.cuda._sleep(_AHEAD_CYCLES)

    took_us = _least_us([launched(way) for way in ways], _ROUNDS, ahead)
    return [us / _LAUNCHES for us in took_us]


def replayed_us(ways: Sequence[Callable[[], Any]]) -> list[float]:
    """GPU time of one call of each way in a graph, in microseconds: the least of some rounds."""
    import torch

    graphs = [torch.cuda.CUDAGraph() for _ in ways]
    for graph, way in zip(graphs, ways, strict=True):
        with torch.cuda.graph(graph):
            for _ in range(_CAPTURED_CALLS):
                way()
    took_us = _least_us([graph.replay for graph in graphs], _REPLAYS)
    return [us / _CAPTURED_CALLS for us in took_us]


def _least_us(
    ways: Sequence[Callable[[], Any]], rounds: int, before: Callable[[], Any] = lambda: None
) -> list[float]:
    """GPU time of each way by turns, by events; `before` is called before each and not timed."""
    import torch

    least_us = [float("inf")] * len(ways)
    for number in range(rounds + 1):
        for i, way in enumerate(ways):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            begin.record()
            way()
            end.record()
            end.synchronize()
            if number:  # the first round warms up
                least_us[i] = min(least_us[i], begin.elapsed_time(end) * 1e3)
    return least_us


def more_launched_us(engine: Callable[[], Any], swapped: Callable[[], Any]) -> float:
    """How many microseconds longer the host takes to launch `swapped` than `engine`: the medians of
    some launches by turns, which do not wait for the device."""
    import torch

    torch.cuda.synchronize()
    took_us: tuple[list[float], list[float]] = ([], [])
    for _ in range(_HOST_LAUNCHES):
        for way, times_us in zip((engine, swapped), took_us, strict=True):
            begin = perf_counter()
            way()
            times_us.append((perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return median(took_us[1]) - median(took_us[0])
