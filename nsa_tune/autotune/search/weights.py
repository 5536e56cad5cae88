"""Batches with how often they occur, and those of them that a point is tuned on."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point

__all__ = ["Weighted", "most_frequent"]

Weighted = tuple[Batch, float]
"""A batch and how often it occurs."""

_MOST_TRACED = 160


def most_frequent(point: Point, grid: Sequence[Batch], trace: Sequence[Weighted]) -> list[Weighted]:
    """The batches of `trace` that occur most, of those that `point` answers.

    Batches with more tokens than any of the grid are left out: on a CPU they would take minutes.
    """
    most_q = max((batch.q_tokens for batch in grid), default=0)
    most_kv = max((batch.kv_tokens for batch in grid), default=0)
    own: dict[Batch, float] = {}
    for batch, weight in trace:
        fits = batch.q_tokens <= most_q and batch.kv_tokens <= most_kv
        if fits and batch.mode in point.modes and batch.lens is not None:
            own[batch] = own.get(batch, 0.0) + weight
    return sorted(own.items(), key=lambda pair: (-pair[1], str(pair[0])))[:_MOST_TRACED]
