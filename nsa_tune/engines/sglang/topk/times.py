"""How long both kernels took to select keys in this engine, and which is faster for a call."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from nsa_tune.engines.sglang.timing import gains

_WIN = 0.97
"""A kernel is faster if it takes less than this part of the other's time."""


@dataclass(frozen=True, slots=True)
class TopkTime:
    """Both kernels on rows of equal length."""

    method: str
    """"PAGED" or "RAGGED"."""
    rows: int
    keys: int
    engine_us: float
    own_us: float
    more_host_us: float = 0.0
    """How much longer the host launches nsa-tune's."""

    @property
    def is_win(self) -> bool:
        """Whether nsa-tune's kernel was faster, by more than the host needs to launch it."""
        return gains(self.engine_us, self.own_us, self.more_host_us, part=_WIN)


class TopkTimes:
    """Which kernel is faster: nsa-tune's where it was at all measured sizes around a call."""

    def __init__(self, times: Iterable[TopkTime]) -> None:
        self.times = tuple(times)
        self._wins = {(one.method, one.rows, one.keys): one.is_win for one in self.times}
        self._keys: dict[str, dict[int, list[int]]] = {}
        for one in sorted(self.times, key=lambda one: (one.rows, one.keys)):
            self._keys.setdefault(one.method, {}).setdefault(one.rows, []).append(one.keys)

    def is_win(self, method: str, rows: int, keys: int) -> bool:
        """Whether nsa-tune's kernel is faster for `rows` rows of up to `keys` keys.

        Fewer rows than were measured are left to the engine; more of either count as the most.
        """
        measured = self._keys.get(method, {})
        sizes = list(measured)
        if not sizes or rows < sizes[0]:
            return False
        return all(
            self._wins[method, size, key]
            for size in _around(sizes, rows)
            for key in _around(measured[size], keys)
        )


def _around(sizes: list[int], size: int) -> set[int]:
    """The measured sizes next to `size`."""
    below = max(bisect_right(sizes, size) - 1, 0)
    above = min(bisect_left(sizes, size), len(sizes) - 1)
    return {sizes[below], sizes[above]}
