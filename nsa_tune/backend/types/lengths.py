"""Sums over the lengths of a batch's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

MAX_TOKENS = 2**31 - 1
"""Kernels index tokens with int32: no length or sum may pass this."""


def pairs_of(prefixes: Sequence[int], kv_lens: Sequence[int], q_tokens: int) -> int:
    """The sum of new * prefix + new * (new + 1) / 2, which is half of kv**2 - prefix**2 + new."""
    twice: int = sum(map(mul, kv_lens, kv_lens)) - sum(map(mul, prefixes, prefixes))
    return (twice + q_tokens) // 2
