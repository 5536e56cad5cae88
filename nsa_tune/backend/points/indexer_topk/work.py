"""What a selection makes of a batch's rows: each is a block's, and blocks are begun in order.

A row that sees no more keys than are selected takes them all: its scores are not read. A block
has 1024 threads, so that an SM runs two at a time: a place for one goes through a row after the
other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nsa_tune.backend.points.splits import until_the_end

__all__ = ["Work", "work_of"]

_MOST_TURNS = 4
"""Rows a place up to which their order is looked at: with more it matters less and takes longer."""


class Work(NamedTuple):
    """Of the rows that select; floats, whose products take a third of a mixed one's time."""

    selecting_rows: float
    scores: float
    waves: float
    """Rows of the place that has most of them."""
    scores_of_the_busiest: float
    """What a place reads until the last row ends. A sequence's rows count as if they were equal."""


def work_of(sequences: Iterable[tuple[int, int, int]], topk: int, places: int) -> Work:
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
    if rows > _MOST_TURNS * places:
        busiest = scores / places + longest / 2
    else:
        busiest = until_the_end(runs, places)
    return Work(float(rows), float(scores), float(-(-rows // places)), float(busiest))
