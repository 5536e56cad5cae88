"""How much work a selection is: the features that a kernel's time is a weighted sum of."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

from nsa_tune.backend.points.indexer_topk.work import Work, work_of
from nsa_tune.backend.points.sequences import FUNCTIONS, by_sequences
from nsa_tune.backend.types.formula import Formulas
from nsa_tune.backend.types.point import Setting

_FEATURES = ("rows", *Work._fields)
_ROWS_AN_SM = 2
_SHORT = 8192
"""Scores of a row up to which `sampled` reads it once, into registers."""


def formulas(setting: Setting) -> Formulas:
    """The features of a batch: a query scores the keys that it sees."""
    slots = _ROWS_AN_SM * max(setting.device.sms, 1)
    work = f"selection_work_of({{}}, {setting.profile.index_topk}, {slots})"
    values = {", ".join(Work._fields): by_sequences(work)}
    coordinates = {
        "rows": "log2(q_tokens)",
        "scores_a_row": "log2(pairs / q_tokens)",
        "longest_over_mean": "log2(max_kv * q_tokens / pairs) / 2",
    }
    functions: dict[str, Callable[..., Any]] = {
        **FUNCTIONS,
        "log2": log2,
        "selection_work_of": work_of,
    }
    regime = f"0 if max_kv <= {_SHORT} else 1"
    return Formulas(values, _FEATURES, coordinates, regime, functions, regimes=frozenset({0, 1}))
