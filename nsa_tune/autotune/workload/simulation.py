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
5. An extend takes `q_tokens / prefill_rate` seconds and a decode `decode_s`. This only decides
   which requests have arrived by the next pass.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile
from math import ceil, floor

from nsa_tune.autotune.workload.requests import BLOCK, TraceRequest
from nsa_tune.backend.types.batch import Batch

__all__ = ["Pass", "SchedulerConfig", "passes"]


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
    """One forward pass. Call `batch` before the simulation goes on: it refers to live state."""

    def __init__(
        self,
        engine: SchedulerConfig,
        step: int,
        extend: Sequence[tuple[int, int]],
        running: Sequence[_Run],
    ) -> None:
        self._engine, self._step = engine, step
        self._extend, self._running = extend, running

    @property
    def is_extend(self) -> bool:
        """Whether it is a prefill pass."""
        return bool(self._extend)

    def batch(self) -> Batch:
        """The batch of the pass."""
        if self._extend:
            return Batch.extend([p for p, _ in self._extend], [n for _, n in self._extend])
        engine = self._engine
        contexts = [one.context(self._step, engine) for one in sorted(self._running)]
        if engine.next_n == 1:
            return Batch.decode(contexts)
        return Batch.verify(contexts, engine.next_n)


@dataclass(frozen=True, order=True, slots=True)
class _Run:
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
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def prefix(self, request: TraceRequest) -> int:
        """Cached leading tokens of `request`, at most all but its last."""
        found = list(takewhile(self._blocks.__contains__, request.blocks))
        for block in found:
            self._blocks.move_to_end(block)
        return min(len(found) * BLOCK, request.input_tokens - 1)

    def add(self, request: TraceRequest) -> None:
        """`request` is prefilled: cache its blocks, and evict others."""
        for block in request.blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


def passes(requests: Sequence[TraceRequest], engine: SchedulerConfig) -> Iterator[Pass]:
    """The forward passes of an engine for `requests`, which are in order of arrival."""
    arrivals = deque(_Waiting(request, number) for number, request in enumerate(requests))
    waiting: deque[_Waiting] = deque()
    running: list[_Run] = []
    cache, now, step = _Cache(engine.cache_tokens), 0.0, 0
    while arrivals or waiting or running:
        while arrivals and arrivals[0].request.arrival_s <= now:
            waiting.append(arrivals.popleft())
        if waiting and len(running) < engine.max_running:
            lens = _extend(waiting, running, cache, engine, step)
            yield Pass(engine, step, lens, ())
            now += sum(new for _, new in lens) / engine.prefill_rate
        elif running:
            yield Pass(engine, step, (), running)
            step += 1
            now += engine.decode_s
            while running and running[0].end <= step:
                heappop(running)
        else:
            now = arrivals[0].request.arrival_s


def _extend(
    waiting: deque[_Waiting], running: list[_Run], cache: _Cache, engine: SchedulerConfig, step: int
) -> list[tuple[int, int]]:
    """Fill a chunk from `waiting`; requests that are then prefilled start to run.

    Returns the prefix length and the number of new tokens of each sequence.
    """
    lens: list[tuple[int, int]] = []
    room = engine.chunk_tokens
    while waiting and room > 0 and len(running) < engine.max_running:
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
            end = step + ceil(request.output_tokens / engine.kept)
            heappush(running, _Run(end, one.number, step, request.input_tokens))
    return lens
