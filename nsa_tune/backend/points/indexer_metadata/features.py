"""Features of the indexer's schedule: rows, and the warps that they fill."""

from __future__ import annotations

from math import log2

from nsa_tune.backend.types.formula import Formulas, Value
from nsa_tune.backend.types.point import Setting


def formulas(setting: Setting) -> Formulas:
    """The features of a batch, and where it lies: octaves of its rows, quarters of its context."""
    del setting
    values = {"warps_of_rows": Value("(q_tokens + 31) // 32")}
    coordinates = {
        "rows": "log2(q_tokens)",
        "mean_context": "log2(kv_tokens / batch_size) / 4",
    }
    return Formulas(values, ("rows", "warps_of_rows"), coordinates, functions={"log2": log2})
