"""Requests as a scheduler meets them: when each arrives, and how much of its input is cached.

Requests are prefilled in the order of their arrival. So what the prefix cache holds of each does
not depend on when passes run, and is found out once, however often a trace is replayed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from nsa_tune.autotune.workload.requests import BLOCK, TraceRequest


class Arrival(NamedTuple):
    """One request."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    """Leading tokens of the input that are in the prefix cache when its prefill begins; at most all
    but the last, which is always computed."""


def arrivals(requests: Iterable[TraceRequest], cache_tokens: int) -> Iterator[Arrival]:
    """`requests`, which are in order of arrival, with a prefix cache of so many tokens: blocks of
    512, the least recently used of which is evicted first."""
    held, capacity = OrderedDict[Hashable, None](), cache_tokens // BLOCK
    for arrival_s, input_tokens, output_tokens, blocks in requests:
        leading, cached = 0, True
        for block in blocks:
            if block in held:
                held.move_to_end(block)
                leading += cached
            else:
                held[block] = None
                cached = False
        while len(held) > capacity:
            held.popitem(last=False)
        cached_tokens = min(leading * BLOCK, input_tokens - 1)
        yield Arrival(arrival_s, input_tokens, output_tokens, cached_tokens)
