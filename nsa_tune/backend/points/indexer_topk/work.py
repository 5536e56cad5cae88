"""What a selection makes of a batch's rows: each is a block's, and blocks are begun in order.

A row that sees no more keys than are selected takes them all: its scores are not read. `sglang`'s
blocks have 1024 threads, so that an SM has slots for two; the same is assumed of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nsa_tune.backend.points.splits import MOST_TURNS, until_the_end


class Work(NamedTuple):
    """Of the rows that select. All are floats: a product of two takes a third of a mixed one's
    time."""

    selecting_rows: float
    scores: float
    waves: float
    """Rows of the slot that has most of them."""
    scores_of_the_busiest: float
    """What a slot reads until the last row ends. A sequence's rows count as if they were equal."""


def work_of(sequences: Iterable[tuple[int, int, int]], topk: int, slots: int) -> Work:
    """The work of `sequences`: (prefix, new tokens, how many like this)."""
    rows = scores = longest = 0
    runs: list[tuple[int, int]] = []
    for prefix, new, count in sequences:
        kv = prefix + new
        selecting = min(new, kv - topk)
        if selecting > 0:
            rows += count * selecting
            scores += count * (selecting * kv - selecting * (selecting - 1) // 2)
            longest = max(longest, kv)
            runs += [(kv - selecting // 2, selecting)] * count
    if not rows:
        return Work(0.0, 0.0, 0.0, 0.0)
    if rows > MOST_TURNS * slots:
        busiest = scores / slots + longest / 2
    else:
        busiest = until_the_end(runs, slots)
    return Work(float(rows), float(scores), float(-(-rows // slots)), float(busiest))
