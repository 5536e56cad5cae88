"""Extend batches from the lengths that an engine's host has.

Lengths are taken from lists. Some passes carry tensors instead, and reading those could wait for
the device.
"""

from __future__ import annotations

from operator import add
from typing import Any

from nsa_tune.backend.types.batch import Batch, extend_of_sums
from nsa_tune.backend.types.lengths import pairs_of, pairs_with

_EXACT_TOKENS = 2**22
"""New tokens up to which their products with lengths of 31 bits, and the sums of these, are exact
in float64."""
_ONES: list[Any] = [()]
"""An array of ones, as long as the longest that was asked for."""


def sums_of(prefix_lens: Any, extend_lens: Any) -> Batch | None:
    """An extend batch by its sums; None unless both are lists of one length with a new token."""
    if type(prefix_lens) is not list or type(extend_lens) is not list:
        return None
    sequences = len(extend_lens)
    if sequences != len(prefix_lens):
        return None
    if sequences == 1:
        return _of_one(prefix_lens[0] + extend_lens[0], extend_lens[0])
    q_tokens = sum(extend_lens)
    if q_tokens < 1:
        return None
    # A padded batch ends in sequences without tokens.
    if not all(extend_lens):
        sequences -= extend_lens.count(0)
    kv_lens = list(map(add, prefix_lens, extend_lens))
    pairs = pairs_of(prefix_lens, kv_lens, q_tokens)
    return extend_of_sums(sequences, q_tokens, sum(kv_lens), max(kv_lens), pairs)


def sums_of_kv(kv_lens: list[int], new_lens: list[int], q_tokens: int) -> Batch | None:
    """As `sums_of`, from the lengths with the new tokens in them and the sum of `new_lens`; None
    too where a sequence has no new token."""
    count = len(new_lens)
    if len(kv_lens) != count:
        return None
    if count == 1:
        return _of_one(kv_lens[0], q_tokens)
    if not all(new_lens) or not 0 < count <= q_tokens:
        return None
    pairs = pairs_with(kv_lens, new_lens, q_tokens)
    return extend_of_sums(count, q_tokens, sum(kv_lens), max(kv_lens), pairs)


def _of_one(kv_tokens: int, new: int) -> Batch | None:
    if new < 1:
        return None
    pairs = new * kv_tokens - new * (new - 1) // 2
    return extend_of_sums(1, new, kv_tokens, kv_tokens, pairs)


def sums_of_arrays(kv_lens: Any, new_lens: Any, q_tokens: int) -> Batch | None:
    """As `sums_of_kv`, from NumPy arrays of float64 that hold int32, and the sum of `new_lens`. It
    takes as long as 35 sequences in lists take, however many there are."""
    count = len(new_lens)
    if len(kv_lens) != count or new_lens.item(new_lens.argmin()) < 1:
        return None
    if q_tokens > _EXACT_TOKENS:
        kv, new = (list(map(int, some.tolist())) for some in (kv_lens, new_lens))
        return sums_of_kv(kv, new, q_tokens)
    # Each new token sees its sequence, but for the new ones behind it.
    behind = (int(new_lens.dot(new_lens)) - q_tokens) // 2
    pairs = int(kv_lens.dot(new_lens)) - behind
    max_kv = int(kv_lens.item(kv_lens.argmax()))
    # A dot product takes half the time that `sum` takes.
    kv_tokens = int(kv_lens.dot(_ones(kv_lens)))
    return extend_of_sums(count, q_tokens, kv_tokens, max_kv, pairs)


def _ones(like: Any) -> Any:
    """As many ones as `like` has numbers."""
    ones = _ONES[0]
    if len(ones) < len(like):
        ones = _ONES[0] = like**0
    return ones[: len(like)]


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
