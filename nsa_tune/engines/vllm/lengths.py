"""The prefills of a step, from the lengths that the engine keeps on the host.

What is here runs in every step with a prefill, so that it is written for speed: lists for few
requests, arrays for many, and tuples in place of classes.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import sub
from typing import Any, TypeAlias

from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.extends import sums_of_arrays, sums_of_kv

Prefills: TypeAlias = tuple[Batch, Any, Any, bool, int]
"""The sums of the prefills; the new tokens of each and how long each is with them, as lists, or as
arrays where they are many; whether decodes come before them; new tokens of the whole step."""

FEW = 40
"""Requests up to which lists take less time than arrays."""


def prefills_of(starts: Any, lens: Any, requests: int, decode_tokens: int) -> Prefills | None:
    """The requests from the first one on that has more than `decode_tokens` new tokens.

    `starts` [requests + 1] and `lens` [requests] are tensors on the host: where each request's new
    tokens begin, and how long it is with them. None where there is no such request, or where one
    among them has no new token, as a padded step has at its end.
    """
    if requests > FEW:
        return _of_arrays(starts.numpy(), lens.numpy(), decode_tokens)
    begins, kv_lens = starts.tolist(), lens.tolist()
    if begins[1] > decode_tokens:
        return _of_lists(begins, kv_lens, has_decodes=False)
    first = _first(begins, decode_tokens)
    return _of_lists(begins[first:], kv_lens[first:], has_decodes=True)


def longest(news: Any) -> int:
    """The most of `news`, a list or an array."""
    return max(news) if type(news) is list else int(news.max())


def _first(starts: list[int], decode_tokens: int) -> int:
    """The first request that is no decode. The decodes come before it."""
    requests = len(starts) - 1
    if decode_tokens > 1:
        for i, new in enumerate(map(sub, starts[1:], starts)):
            if new > decode_tokens:
                return i
        return requests
    if starts[-2] == requests - 1 < starts[-1] - 1:
        return requests - 1  # one behind decodes, as in most steps
    return bisect_left(range(requests), 1, key=lambda i: starts[i + 1] - i - 1)


def _of_lists(begins: list[int], kv_lens: list[int], *, has_decodes: bool) -> Prefills | None:
    end = begins[-1]
    q_tokens = end - begins[0]
    # For a single one the map would take longer.
    news = [q_tokens] if len(begins) == 2 else list(map(sub, begins[1:], begins))
    if len(kv_lens) > len(news):
        kv_lens = kv_lens[: len(news)]
    sums = sums_of_kv(kv_lens, news, q_tokens)
    return None if sums is None else (sums, news, kv_lens, has_decodes, end)


def _of_arrays(starts: Any, lens: Any, decode_tokens: int) -> Prefills | None:
    requests = len(starts) - 1
    if len(lens) < requests:
        return None
    item, first = starts.item, 0
    if item(1) <= decode_tokens:
        last, end = item(requests - 1), item(requests)
        if last == requests - 1 and end - last > decode_tokens == 1:
            news, kv_lens = [end - last], [lens.item(last)]  # one behind decodes, as in most steps
            sums = sums_of_kv(kv_lens, news, end - last)
            return None if sums is None else (sums, news, kv_lens, True, end)
        longer = starts[1:] - starts[:-1] > decode_tokens
        first = int(longer.argmax())
        if not longer.item(first):
            return None
        starts, lens = starts[first:], lens[first:]
        requests -= first
        if requests <= FEW:
            return _of_lists(starts.tolist(), lens.tolist(), has_decodes=True)
    # As floating point numbers, which hold such lengths exactly, they are multiplied in least time.
    begins, kv_lens = starts.astype("d"), lens[:requests].astype("d")
    news = begins[1:] - begins[:-1]
    end = starts.item(requests)
    sums = sums_of_arrays(kv_lens, news, end - starts.item(0))
    return None if sums is None else (sums, news, kv_lens, first > 0, end)
