"""Replacing a kernel of SGLang's by one of nsa-tune's, where that is right and faster.

When an engine starts, both kernels run on made-up calls of some sizes. Their outputs are compared,
and both are timed. If no rank leaves the kernel to SGLang, all go by rank 0's times: a call gets
nsa-tune's kernel if it was the faster one at all measured sizes around the call's. After an error
SGLang's kernel runs for the engine's life.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nsa_tune import __version__
from nsa_tune.engines.sglang import attempt, last_start, say_once
from nsa_tune.engines.sglang.eligible import Engine, why_not
from nsa_tune.engines.sglang.kernels.timing import more_launched_us, replayed_us, timed_us
from nsa_tune.engines.sglang.ranks import Ranks
from nsa_tune.engines.sglang.switch import SWITCHES, Part, paused, switch_is_on

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A made-up call of one size, by both kernels."""

    size: Size
    engine: Callable[[], Any]
    """SGLang's kernel."""
    swapped: Callable[[], Any]
    """nsa-tune's."""
    compared: Callable[[], Any] | None = None
    """What is compared with SGLang's output, where that is not what is timed."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Both kernels at one size, in microseconds of GPU time."""

    size: Size
    engine_us: float
    swapped_us: float
    more_host_us: float = 0.0
    """How much longer the host takes to launch nsa-tune's."""

    def is_win(self, margin: float) -> bool:
        """Whether nsa-tune's kernel saves more than `margin` of SGLang's time.

        A pass of few tokens waits for its host, and the host launches a Triton kernel later than
        one of C++. So what it launches later counts as if the GPU waited for it.
        """
        return self.swapped_us + max(self.more_host_us, 0.0) < (1 - margin) * self.engine_us


class Wins:
    """At which sizes nsa-tune's kernel is the faster one."""

    def __init__(self, timings: Iterable[Timing], margin: float, *, beyond: bool) -> None:
        """`beyond`: whether larger calls than were measured go by the largest that was."""
        self.timings = tuple(timings)
        self._beyond = beyond
        self._wins = {timing.size: timing.is_win(margin) for timing in self.timings}
        self._last: tuple[Size, bool] = ((), False)

    def __contains__(self, size: Size) -> bool:
        """Whether nsa-tune's kernel was faster at all measured sizes around `size`.

        By the first number, smaller calls than were measured are left to SGLang.
        """
        # All layers of a pass ask for the same.
        if size != self._last[0]:
            self._last = size, self._faster_around(size)
        return self._last[1]

    def _faster_around(self, size: Size) -> bool:
        first = [measured[0] for measured in self._wins]
        if not first or size[0] < min(first) or (size[0] > max(first) and not self._beyond):
            return False
        return all(self._wins[near] for near in _around(self._wins, size))

    @property
    def faster(self) -> list[Timing]:
        """The measured sizes at which it was."""
        return [timing for timing in self.timings if self._wins[timing.size]]


def _around(sizes: Iterable[Size], size: Size) -> Iterator[Size]:
    """The measured sizes next to `size`, in each dimension; at an end, the last one."""
    if not size:
        yield ()
        return
    inner: dict[int, list[Size]] = {}
    for first, *rest in sorted(sizes):
        inner.setdefault(first, []).append(tuple(rest))
    axis = list(inner)
    below = max(bisect_right(axis, size[0]) - 1, 0)
    above = min(bisect_left(axis, size[0]), len(axis) - 1)
    for first in {axis[below], axis[above]}:
        for near in _around(inner[first], size[1:]):
            yield (first, *near)


@dataclass(slots=True)
class KernelSwap:
    """One kernel of SGLang's, and nsa-tune's in its place. There is one object a process."""

    name: str
    """A word that may stand in a file's name."""
    part: Part
    """By which the table of exceptions (eligible.py) and the switch apply."""
    does: str
    """What the kernel does, as a sentence about it continues."""
    units: Sequence[str]
    """What a size counts, by dimension."""
    calls: Callable[[Engine], Iterator[Call]]
    """The calls on which both are compared and timed."""
    applies: Callable[[Engine], bool] = lambda engine: True
    """Whether this engine calls the kernel at all."""
    owner_of: Callable[[Engine], object] = lambda engine: None
    """The object of SGLang's whose calls may be answered; None: any."""
    margin: float = 0.03
    """Share of SGLang's time that nsa-tune's kernel must save."""
    tolerance: float | None = 0.0
    """Largest relative error (of the norms) between both outputs; 0: they are equal bit by bit;
    None: `calls` checks what nsa-tune's kernel computes by itself."""
    captured: bool = False
    """Whether it runs in captured graphs: the host's time does not count there."""
    wins: Wins | None = None
    """None: SGLang's kernel runs."""
    owner: object = None

    def start(self, runner: Any) -> None:
        """Compare and time both kernels in `runner`, SGLang's ModelRunner."""
        if runner.is_draft_worker:
            return
        self.forget()
        engine, ranks = Engine.of(runner), Ranks(runner)
        reason = why_not(self.part, engine)
        wanted = reason is None and self.applies(engine)
        alike = ranks.agree(self.name, __version__ if wanted else None)
        if reason is not None:
            # A start with another kind of attention says nothing about this.
            self._say(f"SGLang's kernel {self.does}: {reason}", keep="than DSA" not in reason)
        elif wanted and not alike:
            self._say(f"SGLang's kernel {self.does}: another rank leaves it to SGLang")
        elif wanted:
            self._measure(engine, ranks)

    def _measure(self, engine: Engine, ranks: Ranks) -> None:
        """Take the kernel where it is faster by rank 0's clock, if it is right on all ranks."""
        begin, timings = time.monotonic(), None
        last_start.keep(self.name, f"comparing the kernel that {self.does} failed: see the log")
        try:
            timings = tuple(self.timings(self.calls(engine)))
        finally:
            alike = ranks.agree(f"{self.name}, measured", None if timings is None else "")
        if not alike:
            self._say(f"SGLang's kernel {self.does}: nsa-tune's failed on another rank")
            return
        wins = Wins(ranks.from_first(timings), self.margin, beyond=not self.captured)
        self.wins, self.owner = wins, self.owner_of(engine)
        self._say(f"{self._summary(wins)}; measured in {time.monotonic() - begin:.1f} s")

    def timings(self, calls: Iterable[Call]) -> Iterator[Timing]:
        """Compare and time both kernels on each call.

        Raises:
            RuntimeError: when they do not compute the same.
        """
        for call in calls:
            if self.tolerance is not None:
                self._compare(call, self.tolerance)
            ways = (call.engine, call.swapped)
            if self.captured:
                engine_us, swapped_us = replayed_us(ways)
                yield Timing(call.size, engine_us, swapped_us)
            else:
                engine_us, swapped_us = timed_us(ways)
                yield Timing(call.size, engine_us, swapped_us, more_launched_us(*ways))

    def _compare(self, call: Call, tolerance: float) -> None:
        error = relative_error(call.engine(), (call.compared or call.swapped)())
        # No number is no agreement either.
        if not error <= tolerance:
            raise RuntimeError(
                f"at {self._size(call.size)} nsa-tune's kernel, which {self.does}, is "
                f"{error:.3g} away from SGLang's"
            )

    def takes(self, size: Size, owner: object = None) -> bool:
        """Whether a call of `owner` with this size gets nsa-tune's kernel now.

        The switch is read in each pass, as SGLang reads its own: so both can be measured.
        """
        return self.is_on(owner) and self.wins is not None and size in self.wins

    def is_on(self, owner: object = None) -> bool:
        """Whether any call of `owner` may get nsa-tune's kernel now."""
        return (
            self.wins is not None
            and (self.owner is None or self.owner is owner)
            and not paused()
            and switch_is_on(self.part)
        )

    def run(self, kernel: Callable[..., Any], *given: Any) -> Any:
        """nsa-tune's kernel on a call; None where SGLang's has to answer."""
        return attempt(f"nsa-tune's kernel that {self.does}", self._once, kernel, *given)

    def forget(self) -> None:
        """Leave all calls to SGLang's kernel."""
        self.wins = self.owner = None

    def _once(self, kernel: Callable[..., Any], *given: Any) -> Any:
        try:
            return kernel(*given)
        except BaseException:
            # Once is enough: each layer would fail again.
            self.forget()
            raise

    def _say(self, text: str, *, keep: bool = True) -> None:
        """Log it, and keep it for the doctor."""
        say_once(logging.INFO, text)
        if keep:
            last_start.keep(self.name, text)

    def _size(self, size: Size) -> str:
        return " of ".join(f"{count} {unit}" for count, unit in zip(size, self.units, strict=True))

    def _summary(self, wins: Wins) -> str:
        if not wins.faster:
            return f"SGLang's kernel {self.does}: it is as fast at all measured sizes"
        best = max(wins.faster, key=lambda timing: timing.engine_us / timing.swapped_us)
        return (
            f"nsa-tune's kernel {self.does}: it is faster at {len(wins.faster)} of "
            f"{len(wins.timings)} measured sizes, {best.engine_us:.0f} to {best.swapped_us:.0f} us "
            f"at {self._size(best.size)} ({SWITCHES[self.part]}=0 leaves this to SGLang)"
        )


def relative_error(engine: Any, swapped: Any) -> float:
    """The norm of the difference over that of SGLang's output; 0 only for the same bits."""
    import torch

    if swapped is None:
        raise RuntimeError("nsa-tune's kernel cannot take a call of this engine")
    swapped = swapped.reshape(engine.shape)
    if engine.dtype == swapped.dtype and torch.equal(_bits(engine), _bits(swapped)):
        return 0.0
    error = (swapped.float() - engine.float()).norm() / engine.float().norm()
    return max(float(error), 1e-30) if not error.isnan() else float("nan")


def is_captured() -> bool:
    """Whether a graph would keep what runs now."""
    import torch

    return torch.cuda.is_current_stream_capturing()


def current_device() -> Any:
    """The GPU that calls are made up on."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().view(torch.uint8)
