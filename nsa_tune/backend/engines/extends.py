"""Extend batches from the lengths that an engine's host has.

Lengths are taken from lists. Some passes carry tensors instead, and reading those could wait for
the device.
"""

from __future__ import annotations

from math import dist, hypot
from operator import add
from typing import Any

from nsa_tune.backend.types.batch import Batch, extend_of_sums

__all__ = ["batch_of", "sums_of", "sums_of_arrays", "sums_of_kv"]


def sums_of(prefix_lens: Any, extend_lens: Any) -> Batch | None:
    """An extend batch by its sums; None unless both are lists of one length with a new token."""
    if type(prefix_lens) is not list or type(extend_lens) is not list:
        return None
    if len(extend_lens) == 1 == len(prefix_lens):
        prefix, new = prefix_lens[0], extend_lens[0]
        kv_tokens = prefix + new
        if new < 1:
            return None
        pairs = prefix * new + new * (new + 1) // 2
        return extend_of_sums(1, new, kv_tokens, kv_tokens, pairs)
    q_tokens = sum(extend_lens)
    # A padded batch ends in sequences without tokens.
    sequences = len(extend_lens)
    if not all(extend_lens):
        sequences -= extend_lens.count(0)
    if q_tokens < 1 or len(extend_lens) != len(prefix_lens):
        return None
    kv_lens = list(map(add, prefix_lens, extend_lens))
    # kv² - prefix² = new (2 prefix + new). Norms are summed in C, and exact to below half a pair
    # while a batch has fewer than 2**50 of them.
    kv_norm, prefix_norm = hypot(*kv_lens), hypot(*prefix_lens)
    pairs = (round(kv_norm * kv_norm - prefix_norm * prefix_norm) + q_tokens) // 2
    return extend_of_sums(sequences, q_tokens, sum(kv_lens), max(kv_lens), pairs)


def sums_of_kv(kv_lens: list[int], new_lens: list[int], q_tokens: int) -> Batch | None:
    """As `sums_of`, from the lengths with the new tokens in them and the sum of `new_lens`; None
    too where a sequence has no new token."""
    count = len(new_lens)
    if len(kv_lens) != count or not 0 < count <= q_tokens or not all(new_lens):
        return None
    if count == 1:
        kv_tokens = max_kv = kv_lens[0]
        pairs = q_tokens * kv_tokens - q_tokens * (q_tokens - 1) // 2
    else:
        kv_tokens, max_kv = sum(kv_lens), max(kv_lens)
        # As in `sums_of`: the norm of the prefixes is the distance of these two.
        kv_norm, prefix_norm = hypot(*kv_lens), dist(kv_lens, new_lens)
        pairs = (round(kv_norm * kv_norm - prefix_norm * prefix_norm) + q_tokens) // 2
    return extend_of_sums(count, q_tokens, kv_tokens, max_kv, pairs)


def sums_of_arrays(kv_lens: Any, new_lens: Any, q_tokens: int) -> Batch | None:
    """As `sums_of_kv`, from NumPy arrays of int64 and the sum of `new_lens`. It takes as long as
    40 sequences in lists take, however many there are."""
    count = len(new_lens)
    if len(kv_lens) != count or new_lens.item(new_lens.argmin()) < 1:
        return None
    # Each new token sees its sequence, but for the new ones behind it.
    behind = (int(new_lens.dot(new_lens)) - q_tokens) // 2
    max_kv = kv_lens.item(kv_lens.argmax())
    pairs = int(kv_lens.dot(new_lens)) - behind
    return extend_of_sums(count, q_tokens, int(kv_lens.sum()), max_kv, pairs)


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
