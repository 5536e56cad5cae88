"""Arithmetic on the lengths of many sequences at once, in functions that run in C."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import dist, hypot
from operator import mul, sub
from typing import TypeAlias

MAX_TOKENS = 2**31 - 1
"""Kernels index tokens with int32: no length or sum may pass this."""

number_of = int.from_bytes


Lanes: TypeAlias = tuple[Callable[..., bytes], Callable[[bytes], tuple[int, ...]], int, int, int]
_MOST_KEPT = 4096
"""Sequences up to which lanes are kept: 256 kinds of them take 8 MB."""


def lanes(count: int) -> Lanes:
    """For adding `count` lengths at once, each as 32 bits of one long number: to bytes, from them,
    how many these are, the largest signed number in each lane, and the highest bit of each."""
    return _kept(count) if count <= _MOST_KEPT else _lanes(count)


def _lanes(count: int) -> Lanes:
    words = struct.Struct(f"<{count}I")
    ones = int.from_bytes(words.pack(*[1] * count), "little")
    return words.pack, words.unpack, words.size, ones * MAX_TOKENS, ones << 31


_kept = lru_cache(maxsize=256)(_lanes)

_EXACT_SQUARES = 2.0**48
"""Up to here the squares of `hypot`, which is good to one unit in the last place, are each less
than 0.16 off, so that their difference rounds to the right integer."""


def pairs_of(prefixes: Sequence[int], kv_lens: Sequence[int], q_tokens: int) -> int:
    """The sum of new * prefix + new * (new + 1) / 2, which is half of kv**2 - prefix**2 + new."""
    longest, before = hypot(*kv_lens), hypot(*prefixes)
    squares = longest * longest
    if squares <= _EXACT_SQUARES:
        twice = int(squares - before * before + 0.5)
    else:
        twice = sum(map(mul, kv_lens, kv_lens)) - sum(map(mul, prefixes, prefixes))
    return (twice + q_tokens) // 2


def pairs_with(kv_lens: Sequence[int], new_lens: Sequence[int], q_tokens: int) -> int:
    """The same from the new tokens: the norm of the prefixes is a distance."""
    longest, before = hypot(*kv_lens), dist(kv_lens, new_lens)
    squares = longest * longest
    if squares > _EXACT_SQUARES:
        return pairs_of(list(map(sub, kv_lens, new_lens)), kv_lens, q_tokens)
    return (int(squares - before * before + 0.5) + q_tokens) // 2
