"""Features of the indexer's logits: rows and keys."""

from __future__ import annotations

from math import log2

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import FeatureFunctions, Setting

_SEGMENT = 256
"""Keys that DeepGEMM gives an SM at once (csrc/apis/attention.hpp, split_kv)."""


def features(setting: Setting) -> FeatureFunctions:
    """Regimes are by queries a sequence, and by whether an SM has more than one segment of keys
    once they are flattened: up to there `flatten` is the fastest, and a second segment costs as
    much as a row."""
    one_segment = _SEGMENT * setting.device.sms

    def regime(batch: Batch) -> int:
        return 2 * batch.next_n + (batch.next_n * batch.kv_tokens > one_segment)

    return FeatureFunctions(("rows", "keys"), _rows_and_keys, _coordinates, regime)


def _rows_and_keys(batch: Batch) -> tuple[float, ...]:
    return float(batch.q_tokens), float(batch.kv_tokens)


def _coordinates(batch: Batch) -> tuple[float, ...]:
    return (
        log2(batch.kv_tokens),
        log2(batch.batch_size) / 2,
        log2(batch.max_kv * batch.batch_size / batch.kv_tokens) / 2,
    )
