"""A small simulation of an engine's scheduler: from requests to the batches of forward passes.

It follows SGLang's scheduler with its defaults, with the radix cache and without overlap:

1. Requests wait in the order of their arrival until fewer than `max_running` are running.
2. A request's longest cached prefix comes from the cache, in blocks of 512 tokens, but for the
   last token, which is always computed. The blocks of a request are cached when it is prefilled.
   Beyond `cache_tokens` the least recently used block is evicted.
3. While a request waits and may run, the pass is an extend: it takes waiting requests in their
   order until the chunk is full. A request that does not fit is split, and its rest comes first in
   the next pass.
4. Otherwise the pass is a decode of all running requests: it verifies `next_n` tokens for each, and
   `1 + acceptance * (next_n - 1)` of them are kept.
5. An extend takes `q_tokens / prefill_rate` seconds and a decode `decode_s`, or what the caller of
   `simulated` says. This decides which requests have arrived by the next pass.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile
from math import ceil, floor, inf
from typing import NamedTuple

from nsa_tune.autotune.workload.requests import BLOCK, TraceRequest
from nsa_tune.backend.types.batch import Batch

__all__ = ["Pass", "SchedulerConfig", "passes", "simulated"]

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
        "_engine",
        "_running",
        "_step",
        "_sums",
        "first_tokens_s",
        "lens",
        "seconds",
        "start_s",
        "steps",
    )

    def __init__(
        self,
        engine: SchedulerConfig,
        step: int,
        lens: Sequence[tuple[int, int]],
        running: _Running,
    ) -> None:
        self._engine, self._step, self._running = engine, step, running
        self._sums: tuple[int, int, int, int, int] | None = None
        self.lens = lens
        """(prefix, new) of each sequence of an extend; empty in a decode."""
        self.steps = 1
        """Passes that this one stands for."""
        self.seconds = 0.0
        """Duration of each of them."""
        self.start_s = 0.0
        """When the first begins, after the trace's first request."""
        self.first_tokens_s: list[float] = []
        """Of each request whose prefill ended with this pass, the time since it arrived."""

    @property
    def is_extend(self) -> bool:
        """Whether it is a prefill pass."""
        return bool(self.lens)

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
        size, next_n = len(self._running.heap), self._engine.next_n
        kv, longest = self._running.contexts(self._step)
        new = size * next_n
        return size, new, kv, longest, next_n * kv - size * (next_n * (next_n - 1) // 2)

    @property
    def pool_tokens(self) -> int:
        """Tokens of all requests that run or are in the pass."""
        running = self._running.contexts(self._step)[0] if self._running.heap else 0
        return running + sum(p + n for p, n in self.lens)

    def batch(self) -> Batch:
        """The batch of the pass."""
        if self.lens:
            return Batch.extend([p for p, _ in self.lens], [n for _, n in self.lens])
        engine = self._engine
        contexts = [one.context(self._step, engine) for one in sorted(self._running.heap)]
        if engine.next_n == 1:
            return Batch.decode(contexts)
        return Batch.verify(contexts, engine.next_n)


class _Run(NamedTuple):
    """A running request. They are ordered by their end, for a heap."""

    end: int
    """The number of its last decode pass."""
    number: int
    start: int
    input_tokens: int

    def context(self, step: int, engine: SchedulerConfig) -> int:
        """Its context length in decode pass `step`, including the tokens to verify."""
        gained = floor((step - self.start) * engine.kept)
        return self.input_tokens + gained + engine.next_n


class _Running:
    """The running requests."""

    def __init__(self, engine: SchedulerConfig) -> None:
        self.heap: list[_Run] = []
        """The first to end comes first."""
        self._kept, self._next_n = engine.kept, engine.next_n
        self._total = 0.0
        """Of their contexts, had each run since pass 0."""
        self._longest: float | None = 0.0
        """The longest of these; None when it must be looked up."""

    def add(self, one: _Run) -> None:
        """`one` begins to decode."""
        heappush(self.heap, one)
        base = self._base(one)
        self._total += base
        if self._longest is not None:
            self._longest = max(self._longest, base) if len(self.heap) > 1 else base

    def end(self, step: int) -> None:
        """Those end whose last pass came before `step`."""
        heap = self.heap
        while heap and heap[0].end <= step:
            base = self._base(heappop(heap))
            self._total -= base
            if base == self._longest:
                self._longest = None

    def contexts(self, step: int) -> tuple[int, int]:
        """The sum of the context lengths in decode pass `step`, and the longest."""
        if self._longest is None:
            self._longest = max(map(self._base, self.heap))
        gained = step * self._kept
        return round(self._total + len(self.heap) * gained), round(self._longest + gained)

    def _base(self, one: _Run) -> float:
        return one.input_tokens + self._next_n - one.start * self._kept


@dataclass(slots=True)
class _Waiting:
    request: TraceRequest
    number: int
    ready: int | None = None
    """Tokens already in the pool; None before the cache is asked."""


class _Cache:
    """The prefix cache: blocks in the pool, the least recently used first."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // BLOCK
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def prefix(self, request: TraceRequest) -> int:
        """Cached leading tokens of `request`, at most all but its last."""
        if not request.blocks:
            return 0
        found = list(takewhile(self._blocks.__contains__, request.blocks))
        for block in found:
            self._blocks.move_to_end(block)
        return min(len(found) * BLOCK, request.input_tokens - 1)

    def add(self, request: TraceRequest) -> None:
        """`request` is prefilled: cache its blocks, and evict others."""
        if not request.blocks:
            return
        for block in request.blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


def passes(requests: Iterable[TraceRequest], engine: SchedulerConfig) -> Iterator[Pass]:
    """The forward passes of an engine for `requests`, which are in order of arrival."""

    def seconds(one: Pass) -> float:
        if one.is_extend:
            return sum(new for _, new in one.lens) / engine.prefill_rate
        return engine.decode_s

    return simulated(requests, engine, seconds, most_steps=1)


def simulated(
    requests: Iterable[TraceRequest],
    engine: SchedulerConfig,
    seconds: Callable[[Pass], float],
    *,
    most_steps: int = _MOST_STEPS,
) -> Iterator[Pass]:
    """As `passes`, where a pass takes what `seconds` says of it.

    Up to `most_steps` decode passes of the same requests come as one. Memory does not grow with
    the number of requests.
    """
    coming = enumerate(requests)
    upcoming = next(coming, None)
    waiting: deque[_Waiting] = deque()
    running = _Running(engine)
    heap, max_running = running.heap, engine.max_running
    cache, now, step = _Cache(engine.cache_tokens), 0.0, 0
    while upcoming is not None or waiting or heap:
        while (
            upcoming is not None and upcoming[1].arrival_s <= now and len(waiting) < _MOST_WAITING
        ):
            waiting.append(_Waiting(upcoming[1], upcoming[0]))
            upcoming = next(coming, None)
        if waiting and len(heap) < max_running:
            lens, begun = _extend(waiting, running, cache, engine, step)
            one = Pass(engine, step, lens, running)
            one.start_s, one.seconds = now, seconds(one)
            now += one.seconds
            one.first_tokens_s = [now - request.arrival_s for request in begun]
            yield one
        elif heap:
            one = Pass(engine, step, (), running)
            one.start_s, one.seconds = now, seconds(one)
            # When a request arrives that may run, the next pass is another one.
            room = len(heap) < max_running
            until = upcoming[1].arrival_s if room and upcoming is not None else inf
            one.steps = _steps(until - now, one.seconds, heap[0].end - step, most_steps)
            yield one
            step += one.steps
            now += one.steps * one.seconds
            running.end(step)
        elif upcoming is not None:
            now = upcoming[1].arrival_s


def _steps(idle_s: float, seconds: float, to_the_next_end: int, most: int) -> int:
    steps = max(min(to_the_next_end, most), 1)
    if seconds > 0 and idle_s < steps * seconds:
        steps = max(ceil(idle_s / seconds), 1)
    return steps


def _extend(
    waiting: deque[_Waiting],
    running: _Running,
    cache: _Cache,
    engine: SchedulerConfig,
    step: int,
) -> tuple[list[tuple[int, int]], list[TraceRequest]]:
    """Fill a chunk from `waiting`; requests that are then prefilled start to run.

    Returns the prefix length and the number of new tokens of each sequence, and these requests.
    """
    lens: list[tuple[int, int]] = []
    begun: list[TraceRequest] = []
    room, kept = engine.chunk_tokens, engine.kept
    heap, max_running = running.heap, engine.max_running
    while waiting and room > 0 and len(heap) < max_running:
        one = waiting[0]
        request = one.request
        if one.ready is None:
            one.ready = cache.prefix(request)
        new = min(request.input_tokens - one.ready, room)
        lens.append((one.ready, new))
        one.ready += new
        room -= new
        if one.ready == request.input_tokens:
            waiting.popleft()
            cache.add(request)
            begun.append(request)
            end = step + ceil(request.output_tokens / kept)
            running.add(_Run(end, one.number, step, request.input_tokens))
    return lens, begun
