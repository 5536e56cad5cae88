"""A small simulation of an engine's scheduler: from requests to the batches of forward passes.

It follows SGLang's scheduler with its defaults, with the radix cache and without overlap:

1. Requests wait in the order of their arrival until fewer than `max_running` are running.
2. A request's longest cached prefix comes from the cache, in blocks of 512 tokens, but for the
   last token, which is always computed. The blocks of a request are cached when it is prefilled.
   Beyond `cache_tokens` the least recently used block is evicted (arrivals.py).
3. While a request waits and may run, the pass is an extend: it takes waiting requests in their
   order until the chunk is full. A request that does not fit is split, and its rest comes first in
   the next pass.
4. Otherwise the pass is a decode of all running requests: it verifies `next_n` tokens for each, and
   `1 + acceptance * (next_n - 1)` of them are kept.
5. An extend takes `q_tokens / prefill_rate` seconds and a decode `decode_s`, or what the caller of
   `simulated` says. This decides which requests have arrived by the next pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, floor, inf
from typing import TypeAlias

from nsa_tune.autotune.workload.arrivals import Arrival, arrivals
from nsa_tune.autotune.workload.requests import TraceRequest
from nsa_tune.backend.types.batch import Batch

_MOST_WAITING = 4096
"""Requests that are taken from a trace ahead of their turn; the others stay in its file."""
_MOST_STEPS = 32
"""Decode passes that are told as one, so that contexts hardly grow meanwhile."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings of an engine that its batches depend on."""

    chunk_tokens: int = 8192
    """The most new tokens of an extend pass (SGLang: --chunked-prefill-size)."""
    next_n: int = 2
    """Tokens of each sequence in a decode pass; 1 without speculative decoding."""
    acceptance: float = 0.7
    """Share of the speculated tokens that are accepted."""
    max_running: int = 64
    cache_tokens: int = 2**20
    prefill_rate: float = 20_000.0
    """Tokens per second."""
    decode_s: float = 0.03
    """Seconds per decode pass."""

    @property
    def kept(self) -> float:
        """Tokens that a sequence gains in each decode pass."""
        return 1 + self.acceptance * (self.next_n - 1)


class Pass:
    """One forward pass, or several decode passes of the same requests. Call `batch` before the
    simulation goes on: it refers to live state."""

    __slots__ = (
        "_running",
        "_step",
        "_sums",
        "first_tokens_s",
        "is_extend",
        "lens",
        "seconds",
        "start_s",
        "steps",
    )

    def __init__(
        self, running: _Running, step: int, start_s: float, lens: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._running, self._step = running, step
        self._sums: tuple[int, int, int, int, int] | None = None
        self.lens = lens
        """(prefix, new) of each sequence of an extend; empty in a decode."""
        self.is_extend = bool(lens)
        """Whether it is a prefill pass."""
        self.steps = 1
        """Passes that this one stands for."""
        self.start_s = start_s
        """When the first begins, after the trace's first request."""
        self.seconds = 0.0
        """Duration of each of them."""
        self.first_tokens_s: Sequence[float] = ()
        """Of each request whose prefill ended with this pass, the time since it arrived."""

    @property
    def sums(self) -> tuple[int, int, int, int, int]:
        """Sequences, new tokens, kv tokens, kv tokens of the longest, and (query, key) pairs: what
        `batch` has, at less cost. In a decode they may be off by a token a sequence."""
        if self._sums is None:
            self._sums = self._summed()
        return self._sums

    def _summed(self) -> tuple[int, int, int, int, int]:
        lens = self.lens
        if len(lens) == 1:
            ((prefix, new),) = lens
            kv = prefix + new
            return 1, new, kv, kv, new * prefix + new * (new + 1) // 2
        if lens:
            new = sum([n for _, n in lens])
            pairs = sum([n * p + n * (n + 1) // 2 for p, n in lens])
            kvs = [p + n for p, n in lens]
            return len(lens), new, sum(kvs), max(kvs), pairs
        running, step = self._running, self._step
        size, next_n, kv = len(running.heap), running.engine.next_n, running.contexts(step)
        pairs = next_n * kv - size * (next_n * (next_n - 1) // 2)
        return size, size * next_n, kv, running.longest(step), pairs

    @property
    def pool_tokens(self) -> int:
        """Tokens of all requests that run or are in the pass."""
        running = self._running.contexts(self._step)
        return running + self.sums[2] if self.is_extend else running

    def batch(self) -> Batch:
        """The batch of the pass."""
        if self.lens:
            return Batch.extend([p for p, _ in self.lens], [n for _, n in self.lens])
        contexts, next_n = self._running.lengths(self._step), self._running.engine.next_n
        return Batch.decode(contexts) if next_n == 1 else Batch.verify(contexts, next_n)


_Run: TypeAlias = tuple[int, int, int, int]
"""A running request: the number of its last decode pass, its own number, the decode pass in which
it starts, and its input tokens. A heap has the first to end first."""


class _Running:
    """The running requests."""

    def __init__(self, engine: SchedulerConfig) -> None:
        self.engine = engine
        self.heap: list[_Run] = []
        """The first to end comes first."""
        self._kept, self._next_n = engine.kept, engine.next_n
        self._begun = 0
        self._total = 0.0
        """Of their contexts, had each run since pass 0."""
        self._longest: float | None = 0.0
        """The longest of these; None when it must be looked up."""

    def add(self, input_tokens: int, output_tokens: int, step: int) -> None:
        """A request begins to decode in pass `step`."""
        heap = self.heap
        base = input_tokens + self._next_n - step * self._kept
        self._total += base
        if not heap or (self._longest is not None and base > self._longest):
            self._longest = base
        heappush(heap, (step + ceil(output_tokens / self._kept), self._begun, step, input_tokens))
        self._begun += 1

    def end(self, step: int) -> None:
        """Those end whose last pass came before `step`."""
        heap = self.heap
        while heap and heap[0][0] <= step:
            base = self._base(heappop(heap))
            self._total -= base
            if base == self._longest:
                self._longest = None

    def contexts(self, step: int) -> int:
        """The sum of the context lengths in decode pass `step`."""
        size = len(self.heap)
        return round(self._total + size * (step * self._kept)) if size else 0

    def longest(self, step: int) -> int:
        """The longest context length in decode pass `step`."""
        if self._longest is None:
            self._longest = max(map(self._base, self.heap))
        return round(self._longest + step * self._kept)

    def lengths(self, step: int) -> list[int]:
        """Each context length in decode pass `step`, including the tokens to verify."""
        return [
            tokens + floor((step - start) * self._kept) + self._next_n
            for _, _, start, tokens in sorted(self.heap)
        ]

    def _base(self, one: _Run) -> float:
        _, _, start, tokens = one
        return tokens + self._next_n - start * self._kept


class _Waiting:
    """The requests that wait for their prefill, or for the rest of it."""

    def __init__(self, engine: SchedulerConfig) -> None:
        self.queue: deque[Arrival] = deque()
        self._chunk, self._most = engine.chunk_tokens, engine.max_running
        self._more = 0
        """Tokens of the first that are in the pool besides the cached ones."""

    def fill(self, running: _Running, step: int) -> tuple[list[tuple[int, int]], list[float]]:
        """Fill a chunk; requests that are then prefilled start to run.

        Returns the prefix length and the number of new tokens of each sequence, and when these
        requests arrived.
        """
        lens: list[tuple[int, int]] = []
        begun: list[float] = []
        queue, heap, room = self.queue, running.heap, self._chunk
        while queue and room > 0 and len(heap) < self._most:
            arrival_s, input_tokens, output_tokens, cached = queue[0]
            ready = cached + self._more
            new = input_tokens - ready
            if new > room:
                lens.append((ready, room))
                self._more += room
                break
            lens.append((ready, new))
            room -= new
            self._more = 0
            queue.popleft()
            begun.append(arrival_s)
            running.add(input_tokens, output_tokens, step)
        return lens, begun


def passes(requests: Iterable[TraceRequest], engine: SchedulerConfig) -> Iterator[Pass]:
    """The forward passes of an engine for `requests`, which are in order of arrival."""

    def seconds(one: Pass) -> float:
        if one.is_extend:
            return one.sums[1] / engine.prefill_rate
        return engine.decode_s

    return simulated(arrivals(requests, engine.cache_tokens), engine, seconds, most_steps=1)


def simulated(
    requests: Iterable[Arrival],
    engine: SchedulerConfig,
    seconds: Callable[[Pass], float],
    *,
    most_steps: int = _MOST_STEPS,
) -> Iterator[Pass]:
    """As `passes`, where a pass takes what `seconds` says of it. `requests` say themselves what of
    them is cached.

    Up to `most_steps` decode passes of the same requests come as one. Memory does not grow with
    the number of requests.
    """
    coming = iter(requests)
    upcoming = next(coming, None)
    waiting, running = _Waiting(engine), _Running(engine)
    queue, heap, max_running = waiting.queue, running.heap, engine.max_running
    now, step = 0.0, 0
    while upcoming is not None or queue or heap:
        while upcoming is not None and upcoming.arrival_s <= now and len(queue) < _MOST_WAITING:
            queue.append(upcoming)
            upcoming = next(coming, None)
        if queue and len(heap) < max_running:
            lens, begun = waiting.fill(running, step)
            one = Pass(running, step, now, lens)
            one.seconds = seconds(one)
            now += one.seconds
            one.first_tokens_s = [now - arrival_s for arrival_s in begun]
            yield one
        elif heap:
            one = Pass(running, step, now)
            one.seconds = seconds(one)
            # When a request arrives that may run, the next pass is another one.
            room = len(heap) < max_running
            until = upcoming.arrival_s if room and upcoming is not None else inf
            one.steps = _steps(until - now, one.seconds, min(heap[0][0] - step, most_steps))
            yield one
            step += one.steps
            now += one.steps * one.seconds
            running.end(step)
        elif upcoming is not None:
            now = upcoming.arrival_s


def _steps(idle_s: float, seconds: float, most: int) -> int:
    if seconds > 0 and idle_s < most * seconds:
        return max(ceil(idle_s / seconds), 1)
    return most
