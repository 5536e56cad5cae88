"""Passes are timed while serving, and a way that turns out slower than SGLang's is disabled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from nsa_tune.engines.sglang.pass_mode.mode import PassMode

_EVERY = 8
"""Of so many passes one is timed."""
_ENOUGH = 24
"""Timed passes of a way before it is judged."""
WINDOW = 4 * _ENOUGH
"""The last timed passes of a way, by which it is judged."""
TRIM = 2
"""Of these the slowest and the fastest that do not count: one slow moment of the host says nothing
of a way."""
_RETRY, _RETRY_GROWS = 8192, 4
"""A way that was given up is tried again after so many passes, for what was slow may have been the
host; each further time after so many times as many, for it may be the way."""
_MOST_WAITING = 64


class _Timed:
    """The last timed passes of one way: what they took over what SGLang's own was measured to."""

    __slots__ = ("_passes",)

    def __init__(self) -> None:
        self._passes: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)

    def add(self, took_us: float, engine_us: float) -> None:
        self._passes.append((took_us / engine_us, took_us, engine_us))

    def forget(self) -> None:
        self._passes.clear()

    @property
    def count(self) -> int:
        return len(self._passes)

    @property
    def ratio(self) -> float:
        """Of the sums; long passes weigh more."""
        passes = sorted(self._passes)
        if len(passes) > 2 * TRIM:
            passes = passes[TRIM:-TRIM]
        return sum(took for _, took, _ in passes) / sum(engine for _, _, engine in passes)


class RegressionMonitor:
    """The timed passes of one engine.

    A way is given up where its last passes took longer, on the whole, than SGLang's own way was
    measured to take. If SGLang's own passes take longer or less long than measured by now, that
    counts for the others too. Much later the way is tried again.
    """

    def __init__(self, clock: Callable[[], Any]) -> None:
        """`clock` makes an event that can be recorded and asked, as torch.cuda.Event is."""
        self._clock = clock
        self._seen = 0
        self._waiting: deque[tuple[Any, Any, PassMode, float]] = deque()
        self._timed = {mode: _Timed() for mode in PassMode}
        self._engine_at = 0
        """The last pass by which one of SGLang's own was timed."""
        self._retry_after: dict[PassMode, int] = {}
        """How many passes a way was left out for when it was given up last."""
        self._retry_at: dict[PassMode, int] = {}
        """The pass at which it is tried again, for each way in `losing`."""
        self.disabled: frozenset[PassMode] = frozenset()
        """Ways that are not taken now, on all ranks."""
        self.losing: frozenset[PassMode] = frozenset()
        """Ways that lose, as far as this rank has seen."""

    def begin(self) -> Any:
        """Call it before a pass: an event if this pass is timed, else None."""
        self._seen += 1
        if self._retry_at:
            self._try_again()
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

    def give_up(self) -> None:
        """All ways lose, for good."""
        self.losing = frozenset(PassMode) - {PassMode.ENGINE}
        self._retry_at.clear()

    def _collect(self) -> None:
        while self._waiting and self._waiting[0][1].query():
            start, end, mode, engine_us = self._waiting.popleft()
            self._timed[mode].add(start.elapsed_time(end) * 1e3, engine_us)
            if mode is PassMode.ENGINE:
                self._engine_at = self._seen
            self._judge(mode)

    def _judge(self, mode: PassMode) -> None:
        timed, engine = self._timed[mode], self._timed[PassMode.ENGINE]
        if mode is PassMode.ENGINE or mode in self.losing or timed.count < _ENOUGH:
            return
        recent = self._seen - self._engine_at < _RETRY
        drift = engine.ratio if recent and engine.count >= _ENOUGH else 1.0
        if timed.ratio > drift:
            self.losing |= {mode}
            wait = self._retry_after.get(mode, _RETRY // _RETRY_GROWS) * _RETRY_GROWS
            self._retry_after[mode] = wait
            self._retry_at[mode] = self._seen + wait

    def _try_again(self) -> None:
        for mode in [mode for mode, at in self._retry_at.items() if self._seen >= at]:
            del self._retry_at[mode]
            self.losing -= {mode}
            self._timed[mode].forget()

    def report(self) -> dict[str, dict[str, float]]:
        """By way: timed passes, and what they took over what SGLang's own was measured to take."""
        return {
            mode: {"passes": timed.count, "of_engine": round(timed.ratio, 4)}
            for mode, timed in self._timed.items()
            if timed.count
        }
