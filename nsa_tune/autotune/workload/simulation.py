"""Forward passes from requests: a small simulation of how an engine batches them.

What it does, after SGLang's scheduler with its defaults, radix cache on and overlap left out:

1. A request waits until it comes first and fewer than `max_running` are running.
2. Its longest cached prefix is taken from the cache, in blocks of 512 tokens and never all of it:
   the last token is always computed. Blocks are cached when their request is prefilled; the one
   used longest ago is evicted beyond `cache_tokens`.
3. While one waits and there is room, the pass is an extend: waiting requests in their order, until
   the chunk is full. A request that does not fit is cut, and goes on first in the next pass.
4. Otherwise the pass is a decode of all that run: `next_n` tokens are verified for each, of which
   `1 + acceptance * (next_n - 1)` are kept.
5. A pass takes `q_tokens / prefill_rate` seconds, or `decode_s`. Nothing but the order of arrivals
   depends on these.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile
from math import ceil, floor

from nsa_tune.autotune.workload.requests import BLOCK, Request
from nsa_tune.backend.types.batch import Batch

__all__ = ["Engine", "Pass", "passes"]


@dataclass(frozen=True, slots=True)
class Engine:
    """What of an engine decides about its batches."""

    chunk_tokens: int = 8192
    """Most new tokens of an extend pass (SGLang: --chunked-prefill-size)."""
    next_n: int = 2
    """Tokens a sequence in a decode pass; 1 without speculation."""
    acceptance: float = 0.7
    """Share of the speculated tokens that are kept."""
    max_running: int = 64
    cache_tokens: int = 2**20
    prefill_rate: float = 20_000.0
    """Tokens a second."""
    decode_s: float = 0.03
    """Seconds a decode pass."""

    @property
    def kept(self) -> float:
        """Tokens that a sequence gains a decode pass."""
        return 1 + self.acceptance * (self.next_n - 1)


class Pass:
    """One forward pass. Its batch is to be asked for before the next pass."""

    def __init__(
        self, engine: Engine, step: int, extend: Sequence[tuple[int, int]], running: Sequence[_Run]
    ) -> None:
        self._engine, self._step = engine, step
        self._extend, self._running = extend, running

    @property
    def is_extend(self) -> bool:
        """Whether it is a prefill."""
        return bool(self._extend)

    def batch(self) -> Batch:
        """What the pass holds."""
        if self._extend:
            return Batch.extend([p for p, _ in self._extend], [n for _, n in self._extend])
        engine = self._engine
        contexts = [one.context(self._step, engine) for one in sorted(self._running)]
        if engine.next_n == 1:
            return Batch.decode(contexts)
        return Batch.verify(contexts, engine.next_n)


@dataclass(frozen=True, order=True, slots=True)
class _Run:
    """A request that is being answered; the first to end is the least."""

    end: int
    """The decode pass that is its last."""
    number: int
    start: int
    input_tokens: int

    def context(self, step: int, engine: Engine) -> int:
        """Tokens it has in decode pass `step`, those that are verified among them."""
        gained = floor((step - self.start) * engine.kept)
        return self.input_tokens + gained + engine.next_n


@dataclass(slots=True)
class _Waiting:
    request: Request
    number: int
    ready: int | None = None
    """Tokens that are in the pool; None until it is looked up."""


class _Cache:
    """Blocks that are in the pool, the least recently used first."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def prefix(self, request: Request) -> int:
        """Tokens of `request` that are there; the last token never is."""
        found = list(takewhile(self._blocks.__contains__, request.blocks))
        for block in found:
            self._blocks.move_to_end(block)
        return min(len(found) * BLOCK, request.input_tokens - 1)

    def add(self, request: Request) -> None:
        """`request` is prefilled."""
        for block in request.blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


def passes(requests: Sequence[Request], engine: Engine) -> Iterator[Pass]:
    """The forward passes that `engine` runs for `requests`, which are in order of arrival."""
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
    waiting: deque[_Waiting], running: list[_Run], cache: _Cache, engine: Engine, step: int
) -> list[tuple[int, int]]:
    """Fill a chunk from `waiting`; what is whole then runs."""
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
