"""Does what was promised hold? Passes are timed while serving, and a way that loses is given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from nsa_tune.backend.engines.sglang.pass_mode.mode import PassMode

__all__ = ["Watch"]

_EVERY = 8
"""Of so many passes one is timed."""
_ENOUGH = 24
"""Timed passes of a way before it is judged."""
_MOST_WAITING = 64


class _Sum:
    """Passes of one way: what they took, and what SGLang's own way was measured to take."""

    __slots__ = ("count", "engine_us", "took_us")

    def __init__(self) -> None:
        self.count = 0
        self.took_us = 0.0
        self.engine_us = 0.0

    def add(self, took_us: float, engine_us: float) -> None:
        self.count += 1
        self.took_us += took_us
        self.engine_us += engine_us
        if self.count == 4 * _ENOUGH:  # what is long past counts for less
            self.count //= 2
            self.took_us /= 2
            self.engine_us /= 2

    @property
    def ratio(self) -> float:
        return self.took_us / self.engine_us


class Watch:
    """The timed passes of one engine.

    A way is given up where its passes take longer, on the whole, than SGLang's own way was measured
    to take. If SGLang's own passes take longer or less long than measured by now, that counts for
    the others too.
    """

    def __init__(self, clock: Callable[[], Any]) -> None:
        """`clock` makes an event that can be recorded and asked, as torch.cuda.Event is."""
        self._clock = clock
        self._seen = 0
        self._waiting: deque[tuple[Any, Any, PassMode, float]] = deque()
        self._sums = {mode: _Sum() for mode in PassMode}
        self.given_up: frozenset[PassMode] = frozenset()
        """Ways that are not taken any more."""
        self.found: frozenset[PassMode] = frozenset()
        """Ways that lose, as far as this rank has seen."""

    def begin(self) -> Any:
        """Call it before a pass: an event if this pass is timed, else None."""
        self._seen += 1
        if self._seen % _EVERY or len(self._waiting) >= _MOST_WAITING:
            return None
        start = self._clock()
        start.record()
        return start

    def end(self, start: Any, mode: PassMode, engine_us: float) -> None:
        """Call it after a pass that is timed.

        Args:
            start: what `begin` returned.
            mode: how the pass ran.
            engine_us: what SGLang's own way was measured to take for this batch.
        """
        end = self._clock()
        end.record()
        self._waiting.append((start, end, mode, engine_us))
        self._collect()

    def _collect(self) -> None:
        while self._waiting and self._waiting[0][1].query():
            start, end, mode, engine_us = self._waiting.popleft()
            self._sums[mode].add(start.elapsed_time(end) * 1e3, engine_us)
            self._judge(mode)

    def _judge(self, mode: PassMode) -> None:
        own, engine = self._sums[mode], self._sums[PassMode.ENGINE]
        if mode is PassMode.ENGINE or own.count < _ENOUGH:
            return
        drift = engine.ratio if engine.count >= _ENOUGH else 1.0
        if own.ratio > drift:
            self.found |= {mode}

    def report(self) -> dict[str, dict[str, float]]:
        """By way: timed passes, and what they took over what SGLang's own was measured to take."""
        return {
            mode: {"passes": one.count, "of_engine": round(one.ratio, 4)}
            for mode, one in self._sums.items()
            if one.count
        }
