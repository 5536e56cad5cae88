"""A simulation of an engine's scheduler: from requests to the batches of forward passes.

It follows SGLang's scheduler with its defaults, with the radix cache and without overlap, as
docs/replay.md says; what of a request is cached is known already (arrivals.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, floor, inf
from typing import NamedTuple

from nsa_tune.autotune.workload.arrivals import Arrival, arrivals
from nsa_tune.autotune.workload.requests import TraceRequest
from nsa_tune.backend.types.batch import Batch

_PREFILL_RATE, _DECODE_S = 20_000.0, 0.03  # tokens a second, and seconds of a decode pass
_MOST_STEPS = 32  # decode passes that are told as one, so that contexts hardly grow meanwhile


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings of an engine that its batches depend on."""

    chunk_tokens: int = 8192
    """The most new tokens of an extend pass (SGLang: --chunked-prefill-size)."""
    next_n: int = 2  # tokens of each sequence in a decode pass; 1 without speculative decoding
    acceptance: float = 0.7
    max_running: int = 64
    pool_tokens: int = 2**20
    """Tokens of the KV pool: those of running requests and of the prefix cache."""

    @property
    def kept(self) -> float:
        """Tokens that a sequence gains in each decode pass."""
        return 1 + self.acceptance * (self.next_n - 1)


def stated_s(forward: Pass) -> float:
    """Seconds of a pass by constant rates, where nothing better is known."""
    return forward.sums[1] / _PREFILL_RATE if forward.is_extend else _DECODE_S


@dataclass(slots=True)
class Latencies:
    """What the requests of a simulation waited for, in seconds."""

    first_token_s: list[float] = field(default_factory=list)
    """Of each request, from its arrival to its first token."""
    per_token_s: list[float] = field(default_factory=list)
    """Of each request with more than one token, the mean time between two."""
    ended_s: dict[int, float] = field(default_factory=dict)
    """By the number of a request, in order of arrival: when it ended, after the first arrival."""


@dataclass(slots=True)
class Pass:
    """One forward pass, or several decode passes. `batch` refers to live state: call it at once."""

    _requests: _Requests
    _step: int
    start_s: float  # when the first begins, after the trace's first request
    lens: Sequence[tuple[int, int]] = ()
    """(prefix, new) of each sequence of an extend; empty in a decode."""
    steps: int = 1
    seconds: float = 0.0
    launch_s: float = 0.0  # seconds that the host is busy to launch a prefill
    unqueued: float = 0.0  # part of it that must have run until the last of it is launched
    is_extend: bool = field(init=False)  # whether it is a prefill
    sums: tuple[int, int, int, int, int] = field(init=False)
    """Sequences, new tokens, kv tokens, those of the longest, and (query, key) pairs: what `batch`
    has, at less cost. In a decode kv may be off by one a sequence, and the longest is the mean."""

    def __post_init__(self) -> None:
        self.is_extend = bool(self.lens)
        if self.is_extend:
            tokens = prefixes = longest = pairs = 0
            for prefix, new in self.lens:
                tokens, prefixes = tokens + new, prefixes + prefix
                longest = max(longest, prefix + new)
                pairs += new * prefix + new * (new + 1) // 2
            self.sums = len(self.lens), tokens, tokens + prefixes, longest, pairs
        else:
            held, next_n = self._requests, self._requests.engine.next_n
            size, kv = len(held.heap), held.contexts(self._step)
            pairs = next_n * kv - size * (next_n * (next_n - 1) // 2)
            self.sums = size, size * next_n, kv, kv // size, pairs

    def batch(self) -> Batch:
        """The batch of the pass."""
        if self.lens:
            return Batch.extend([p for p, _ in self.lens], [n for _, n in self.lens])
        next_n, kept = self._requests.engine.next_n, self._requests.engine.kept
        contexts = [
            request.input_tokens + floor((self._step - request.step) * kept) + next_n
            for request in sorted(self._requests.heap)
        ]
        return Batch.decode(contexts) if next_n == 1 else Batch.verify(contexts, next_n)


class _Request(NamedTuple):
    """A running request. A heap has the first to end first."""

    last_step: int  # the number of its last decode pass
    number: int
    step: int  # the decode pass in which it starts
    input_tokens: int
    output_tokens: int


class _Requests:
    """Those that run, and those that wait for their prefill, or for the rest of it."""

    def __init__(self, engine: SchedulerConfig) -> None:
        self.engine = engine
        self.waiting = deque[Arrival]()
        self._computed = 0
        """Tokens of the first waiting one that are in the pool besides the cached ones."""
        self.heap: list[_Request] = []
        self.reserved = 0
        """Tokens of the pool that they will have at their end."""
        self._kept, self._next_n = engine.kept, engine.next_n
        self._begun = 0
        self._total = 0.0
        """Of their contexts, had each run since pass 0."""

    def has_room(self, request: Arrival) -> bool:
        """Whether one more request may run. A single one always may."""
        if not self.heap:
            return True
        tokens = self.reserved + request.input_tokens + request.output_tokens
        return len(self.heap) < self.engine.max_running and tokens <= self.engine.pool_tokens

    def add(self, request: Arrival, step: int) -> None:
        """A request begins to decode in pass `step`."""
        self._total += request.input_tokens + self._next_n - step * self._kept
        self.reserved += request.input_tokens + request.output_tokens
        last = step + max(ceil((request.output_tokens - 1) / self._kept), 1)  # prefills give one
        heappush(self.heap, _Request(last, self._begun, step, *request[1:3]))
        self._begun += 1

    def end(self, step: int) -> Iterator[_Request]:
        """Remove and give those whose last pass came before `step`."""
        while self.heap and self.heap[0].last_step <= step:
            request = heappop(self.heap)
            self._total -= request.input_tokens + self._next_n - request.step * self._kept
            self.reserved -= request.input_tokens + request.output_tokens
            yield request

    def contexts(self, step: int) -> int:
        """The sum of the context lengths in decode pass `step`."""
        return round(self._total + len(self.heap) * (step * self._kept))

    def fill(self, step: int) -> tuple[list[tuple[int, int]], list[Arrival]]:
        """Fill a chunk: prefix and new tokens of each sequence, and requests that it ends."""
        lens: list[tuple[int, int]] = []
        ended: list[Arrival] = []
        queue, room = self.waiting, self.engine.chunk_tokens
        while queue and room > 0 and self.has_room(queue[0]):
            request = queue[0]
            prefix = request.cached_tokens + self._computed
            new = min(request.input_tokens - prefix, room)
            lens.append((prefix, new))
            room -= new
            if prefix + new < request.input_tokens:
                self._computed += new
                break
            self._computed = 0
            ended.append(queue.popleft())
            self.add(request, step)
        return lens, ended


def passes(requests: Iterable[TraceRequest], engine: SchedulerConfig) -> Iterator[Pass]:
    """The forward passes of an engine for `requests`, in order of arrival, by constant rates."""
    return simulated(arrivals(requests, engine.pool_tokens), engine, stated_s, most_steps=1)


def simulated(
    requests: Iterable[Arrival | None], engine: SchedulerConfig, seconds: Callable[[Pass], float],
    *, latencies: Latencies | None = None, most_steps: int = _MOST_STEPS,
) -> Iterator[Pass]:  # fmt: skip
    """The passes of an engine in which a pass takes what `seconds` says of it.

    Up to `most_steps` decode passes of the same requests come as one. `latencies` is filled.
    `requests` may give None while nobody knows when the next one comes.
    """
    coming, upcoming = iter(requests), None
    held, latencies = _Requests(engine), latencies or Latencies()
    queue, heap = held.waiting, held.heap
    first_s, late = dict[int, float](), list[tuple[int, float]]()
    now, spare_s, step, begun = 0.0, 0.0, 0, 0
    while (upcoming := upcoming or next(coming, None)) or queue or heap:
        while upcoming is not None and upcoming.arrival_s <= now:
            queue.append(upcoming)
            upcoming = next(coming, None)
        extend = queue and held.has_room(queue[0])
        if upcoming is not None and not (extend or heap):
            now = upcoming.arrival_s
            continue
        lens, ended = held.fill(step) if extend else ((), ())
        forward = Pass(held, step, now, lens)
        forward.seconds = seconds(forward)
        if late:  # first tokens are handed over when the next pass has been launched
            handed_s = now + max(forward.launch_s - spare_s, forward.unqueued * forward.seconds)
            for number, arrival_s in late:
                first_s[number] = handed_s
                latencies.first_token_s.append(handed_s - arrival_s)
        spare_s = max(forward.seconds - forward.launch_s, 0.0)
        late = [(i, request.arrival_s) for i, request in enumerate(ended, begun)]
        begun += len(late)
        if not extend:
            # When a request arrives that may run, the next pass is another one.
            room = upcoming is not None and held.has_room(upcoming)
            until = upcoming.arrival_s if room and upcoming is not None else inf
            forward.steps = min(heap[0].last_step - step, most_steps)
            if until - now < forward.steps * forward.seconds:
                forward.steps = max(ceil((until - now) / forward.seconds), 1)
            step += forward.steps
        yield forward
        now += forward.steps * forward.seconds
        for over in () if extend else held.end(step):
            gaps = over.output_tokens - 1
            latencies.ended_s[over.number] = now
            latencies.per_token_s += [(now - first_s.pop(over.number)) / gaps] if gaps else []
