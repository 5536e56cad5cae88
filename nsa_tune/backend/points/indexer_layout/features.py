"""Features of the indexer's logits: rows and keys."""

from __future__ import annotations

from math import log2

from nsa_tune.backend.types.formula import Formulas
from nsa_tune.backend.types.point import Setting

_SEGMENT = 256
"""Keys that DeepGEMM gives an SM at once (csrc/apis/attention.hpp, split_kv)."""


def formulas(setting: Setting) -> Formulas:
    """Regimes are by queries a sequence, and by whether an SM has more than one segment of keys
    once they are flattened: up to there `flatten` is the fastest, and a second segment costs as
    much as a row."""
    coordinates = {
        "keys": "log2(kv_tokens)",
        "batch_size": "log2(batch_size) / 2",
        "longest_over_mean": "log2(max_kv * batch_size / kv_tokens) / 2",
    }
    segments = f"next_n * kv_tokens > {_SEGMENT * setting.device.sms}"
    regime = f"2 * next_n + 1 if {segments} else 2 * next_n"
    return Formulas({}, ("rows", "keys"), coordinates, regime, {"log2": log2})
