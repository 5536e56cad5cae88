"""Bisection: the largest size at which a try succeeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nsa_tune.autotune.probe.tries import Outcome, Try


@dataclass(frozen=True, slots=True)
class Found:
    """The limit that a bisection found."""

    limit: int
    """The largest size that succeeded; 0 when not even 1 did."""
    past: Try | None
    """The try at the smallest size that failed; None when the largest size succeeded."""
    tries: tuple[Try, ...]
    """All tries, in their order."""


def find_limit(
    run: Callable[[int], Try], start: int, most: int, expected: int | None = None
) -> Found:
    """The largest size up to `most` that succeeds, assuming that all smaller sizes do too.

    It first tries `expected` and the size after it, if `expected` is given. Unless the limit lies
    between these two, it doubles sizes from `start` until one fails, and bisects the gap.
    """
    tries: list[Try] = []
    low, high = 0, most + 1

    def narrow(size: int) -> None:
        nonlocal low, high
        attempt = run(size)
        tries.append(attempt)
        if attempt.outcome is Outcome.OK:
            low = size
        else:
            high = size

    for size in () if expected is None else (expected, expected + 1):
        if low < size < high:
            narrow(size)
    size = max(start, low + 1)
    while low < size < high:
        narrow(size)
        size = min(2 * size, most) if size < most else most + 1
    while high - low > 1:
        narrow((low + high) // 2)
    past = next((attempt for attempt in tries if attempt.size == high), None)
    return Found(low, past, tuple(tries))
