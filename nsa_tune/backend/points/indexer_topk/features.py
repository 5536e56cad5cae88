"""How much work a selection is: the features that a kernel's time is a weighted sum of.

A row is a block's, and blocks are begun in order. A row that sees no more keys than are selected
takes them all: its scores are not read. Yet `sampled` takes 2 us longer where there is any.
`sglang`'s blocks have 1024 threads, so that an SM has slots for two; the same is assumed of the
others.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from nsa_tune.backend.points.schedules import makespan, sequences, sms_of
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import FeatureFunctions, Setting

_ROWS_PER_SM = 2
_SHORT = 8192
"""Scores of a row up to which `sampled` reads it once, into registers."""


class Terms(NamedTuple):
    """Of the rows that select, but for the last."""

    scores: float
    waves: float
    """Rows of the slot that has most of them."""
    makespan_scores: float
    """What a slot reads until the last row ends."""
    short_rows: float
    """1 where another row takes all its keys, else 0."""


def features(setting: Setting) -> FeatureFunctions:
    """The features of a batch: a query scores the keys that it sees."""
    topk, slots = setting.profile.index_topk, _ROWS_PER_SM * sms_of(setting)
    return FeatureFunctions(
        Terms._fields, lambda batch: terms(batch, topk, slots), _coordinates, _regime
    )


def terms(batch: Batch, topk: int, slots: int) -> Terms:
    """The features where a query selects `topk` keys, and `slots` rows are at work at a time."""
    rows = scores = longest = 0
    for prefix, new, count in sequences(batch):
        kv = prefix + new
        selecting = min(new, kv - topk)
        if selecting > 0:
            rows += count * selecting
            scores += count * (selecting * kv - selecting * (selecting - 1) // 2)
            longest = max(longest, kv)
    busiest = makespan(rows, scores, longest, slots)
    return Terms(
        float(scores), float(-(-rows // slots)), float(busiest), float(rows < batch.q_tokens)
    )


def _coordinates(batch: Batch) -> tuple[float, ...]:
    return (
        log2(batch.q_tokens),
        log2(batch.pairs / batch.q_tokens),
        log2(batch.max_kv * batch.q_tokens / batch.pairs) / 2,
    )


def _regime(batch: Batch) -> int:
    return 0 if batch.max_kv <= _SHORT else 1
