"""Extend batches from the lengths that an engine's host has.

Lengths are taken from lists. Some passes carry tensors instead, and reading those could wait for
the device.
"""

from __future__ import annotations

from dataclasses import replace
from operator import add
from typing import Any

from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.lengths import pairs_of


def sums_of(prefix_lens: Any, extend_lens: Any) -> Batch | None:
    """An extend batch by its sums; None unless both are lists of one length with a new token."""
    if type(prefix_lens) is not list or type(extend_lens) is not list:
        return None
    sequences = len(extend_lens)
    if sequences != len(prefix_lens):
        return None
    if sequences == 1:
        return _of_sequence(prefix_lens[0] + extend_lens[0], extend_lens[0])
    q_tokens = sum(extend_lens)
    if q_tokens < 1:
        return None
    # A padded batch ends in sequences without tokens.
    if not all(extend_lens):
        sequences -= extend_lens.count(0)
    kv_lens = list(map(add, prefix_lens, extend_lens))
    pairs = pairs_of(prefix_lens, kv_lens, q_tokens)
    return Batch.from_totals(
        mode=Mode.EXTEND, batch_size=sequences, q_tokens=q_tokens, kv_tokens=sum(kv_lens),
        max_kv=max(kv_lens), pairs=pairs,
    )  # fmt: skip


def _of_sequence(kv_tokens: int, new: int) -> Batch | None:
    if new < 1:
        return None
    pairs = new * kv_tokens - new * (new - 1) // 2
    return Batch.from_totals(
        mode=Mode.EXTEND, q_tokens=new, kv_tokens=kv_tokens, max_kv=kv_tokens, pairs=pairs
    )


def selecting(sums: Batch, prefix_lens: list[int], extend_lens: list[int], topk: int) -> Batch:
    """What to ask for of queries that select `topk` keys: `sums`, where some of them select all of
    their keys and others do not with the pairs that are read, which sums would overcount."""
    if sums.max_kv <= topk or min(prefix_lens) >= topk:
        return sums
    unread = 0
    for prefix, new in zip(prefix_lens, extend_lens, strict=True):
        if (most := prefix + new - topk) > 0:
            least = max(prefix - topk, 0)
            unread += most * (most + 1) - least * (least + 1)
    return replace(sums, pairs=sums.pairs - unread // 2)


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
