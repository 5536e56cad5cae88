"""Which batches of real traffic a point is measured on, beside its grid."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_tune.autotune.workload.weighted_batches import WeightedBatch
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point

_MOST = 160


def most_frequent(
    point: Point, grid: Sequence[Batch], trace: Sequence[WeightedBatch]
) -> list[WeightedBatch]:
    """The most frequent batches of `trace` that `point` is for, at most 160.

    Batches with more tokens than every batch of the grid are left out: on a CPU one would take
    minutes.
    """
    most_q = max((batch.q_tokens for batch in grid), default=0)
    most_kv = max((batch.kv_tokens for batch in grid), default=0)
    weights: dict[Batch, float] = {}
    for batch, weight in trace:
        fits = batch.q_tokens <= most_q and batch.kv_tokens <= most_kv
        if fits and batch.mode in point.modes and batch.lens is not None:
            weights[batch] = weights.get(batch, 0.0) + weight
    return sorted(weights.items(), key=lambda pair: (-pair[1], str(pair[0])))[:_MOST]
