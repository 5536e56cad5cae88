"""Features of a decode or verify batch: rows, and the pairs that sparse attention computes."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

from nsa_tune.backend.points.prefill.features import (
    attended_by_length,
    attended_pairs,
    pairs_in_waves,
    wave_of,
)
from nsa_tune.backend.types.formula import Formulas
from nsa_tune.backend.types.point import Setting

__all__ = ["formulas"]


def formulas(setting: Setting) -> Formulas:
    """The features of a batch, and where it lies: octaves of its rows and of the pairs a row."""
    topk, wave = setting.profile.index_topk, wave_of(setting)
    values = {
        **attended_pairs(topk),
        **pairs_in_waves("attended_pairs", f"({topk}.0 if max_kv > {topk} else max_kv)", wave),
    }
    features = ("rows", "attended_pairs", "attended_pairs_in_waves_to_the_longest", "waves")
    coordinates = {
        "rows": "log2(q_tokens)",
        "attended_per_row": "log2(attended_pairs / rows)",
        "mean_context": "log2(kv_tokens / batch_size) / 4",
    }
    functions: dict[str, Callable[..., Any]] = {
        "attended_by_length": attended_by_length,
        "log2": log2,
    }
    return Formulas(values, features, coordinates, functions=functions)
