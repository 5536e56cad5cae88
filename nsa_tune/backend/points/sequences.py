"""A batch's sequences, for features that look at each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from operator import sub
from typing import Any

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.formula import Value


def by_sequences(call: str) -> Value:
    """A value that `call` computes of a batch's sequences, which take the place of its "{}". From
    sums alone the sequences count as equal. The point's functions must have `FUNCTIONS`."""
    return Value(
        call.format("equal_sequences(prefix_tokens, q_tokens, batch_size)"),
        call.format("runs(batch)"),
    )


def equal_sequences(prefix: int, new: int, count: int) -> list[tuple[int, int, int]]:
    """As `runs`: `count` sequences with so many cached and new tokens together, as equal as whole
    tokens allow."""
    each, more = divmod(new, count)
    # The shorter ones come first: one that is odd would shift what all others share blocks with.
    found = [(prefix // count, each, count - more), (prefix // count, each + 1, more)]
    return found if more else found[:1]


def runs(batch: Batch) -> Iterable[tuple[int, int, int]]:
    """(prefix, new, count) of sequences that are alike: all of them, or each by itself."""
    kv_lens, new_lens = batch.kv_lens, batch.new_lens
    assert kv_lens is not None
    assert new_lens is not None
    count, kv, new = len(kv_lens), kv_lens[0], new_lens[0]
    if kv_lens.count(kv) == count == new_lens.count(new):
        return ((kv - new, new, count),)
    return zip(map(sub, kv_lens, new_lens), new_lens, repeat(1), strict=False)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {"equal_sequences": equal_sequences, "runs": runs}
"""What the formulas of `by_sequences` call."""
