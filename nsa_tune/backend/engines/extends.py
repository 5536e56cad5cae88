"""Extend batches from the lengths that an engine's host has.

Lengths are taken from lists. Some passes carry tensors instead, and reading those could wait for
the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import hypot
from operator import add, mul
from typing import Any

from nsa_tune.backend.types.batch import Batch, Mode

__all__ = ["batch_of", "sums_of", "sums_of_kv"]

_EXTEND = Mode.EXTEND


def _sum_of_products(left: list[int], right: list[int]) -> int:
    return sum(map(mul, left, right))


# From Python 3.12 on there is one in C.
_sumprod: Callable[[list[int], list[int]], int] = getattr(math, "sumprod", _sum_of_products)


def sums_of(prefix_lens: Any, extend_lens: Any) -> Batch | None:
    """An extend batch by its sums; None unless both are lists of one length with a new token."""
    if type(prefix_lens) is not list or type(extend_lens) is not list:
        return None
    if len(extend_lens) == 1 == len(prefix_lens):
        prefix, new = prefix_lens[0], extend_lens[0]
        kv_tokens = prefix + new
        if new < 1:
            return None
        return Batch.from_totals(
            mode=_EXTEND, q_tokens=new, kv_tokens=kv_tokens, max_kv=kv_tokens, batch_size=1,
            pairs=prefix * new + new * (new + 1) // 2,
        )  # fmt: skip
    q_tokens = sum(extend_lens)
    # A padded batch ends in sequences without tokens.
    sequences = len(extend_lens) - extend_lens.count(0)
    if q_tokens < 1 or len(extend_lens) != len(prefix_lens):
        return None
    kv_lens = list(map(add, prefix_lens, extend_lens))
    # kv² - prefix² = new (2 prefix + new). Norms are summed in C, and exact to below half a pair
    # while a batch has fewer than 2**50 of them.
    kv_norm, prefix_norm = hypot(*kv_lens), hypot(*prefix_lens)
    pairs = (round(kv_norm * kv_norm - prefix_norm * prefix_norm) + q_tokens) // 2
    return Batch.from_totals(
        mode=_EXTEND, q_tokens=q_tokens, kv_tokens=sum(kv_lens), max_kv=max(kv_lens),
        batch_size=sequences, pairs=pairs,
    )  # fmt: skip


def sums_of_kv(kv_lens: list[int], new_lens: list[int]) -> Batch | None:
    """As `sums_of`, from the lengths with the new tokens in them; None too where a sequence has no
    new token."""
    q_tokens = sum(new_lens)
    if q_tokens < 1 or len(kv_lens) != len(new_lens) or 0 in new_lens:
        return None
    norm = hypot(*new_lens)
    pairs = _sumprod(new_lens, kv_lens) - (round(norm * norm) - q_tokens) // 2
    return Batch.from_totals(
        mode=_EXTEND, q_tokens=q_tokens, kv_tokens=sum(kv_lens), max_kv=max(kv_lens),
        batch_size=len(new_lens), pairs=pairs,
    )  # fmt: skip


def batch_of(prefix_lens: Any, extend_lens: Any) -> Batch | None:
    """An extend batch by its lengths; None as of `sums_of`."""
    if type(prefix_lens) is not list or type(extend_lens) is not list:
        return None
    if len(prefix_lens) != len(extend_lens):
        return None
    if 0 in extend_lens:
        # A padded batch ends in sequences without tokens.
        pairs = [pair for pair in zip(prefix_lens, extend_lens, strict=True) if pair[1]]
        prefix_lens, extend_lens = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return Batch.extend(prefix_lens, extend_lens) if extend_lens else None
