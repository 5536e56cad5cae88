"""Features of the indexer's schedule: rows, and the warps that they fill."""

from __future__ import annotations

from math import log2

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import FeatureFunctions, Setting


def features(setting: Setting) -> FeatureFunctions:
    """The features of a batch, and where it lies: octaves of its rows, quarters of its context."""
    del setting
    return FeatureFunctions(("rows", "warps_of_rows"), _rows_and_warps, _coordinates)


def _rows_and_warps(batch: Batch) -> tuple[float, ...]:
    return float(batch.q_tokens), float((batch.q_tokens + 31) // 32)


def _coordinates(batch: Batch) -> tuple[float, ...]:
    return log2(batch.q_tokens), log2(batch.kv_tokens / batch.batch_size) / 4
