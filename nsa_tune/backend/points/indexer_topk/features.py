"""How much work a selection is: the features that a kernel's time is a weighted sum of.

Each kernel gives a row to a block and reads the scores that count, so that a batch costs the scores
of all its rows, and whole waves of rows where they are few.
"""

from __future__ import annotations

from math import log2

from nsa_tune.backend.types.formula import Formulas, Value
from nsa_tune.backend.types.point import Setting

__all__ = ["formulas"]

_FEATURES = ("rows", "scores", "waves", "scores_in_waves_to_the_longest")
_ROWS_AN_SM = 2
"""Up to so many rows an SM have one to themselves, or nearly so, and finish together."""


def formulas(setting: Setting) -> Formulas:
    """The features of a batch: a query scores the keys that it sees, which are its `pairs`."""
    sms = max(setting.device.sms, 1)
    values = {
        "scores": Value("1.0 * pairs"),
        "waves": Value(f"(q_tokens + {sms - 1}) // {sms}"),
        "scores_in_waves_to_the_longest": Value(
            f"(scores / q_tokens * (waves - 1) + max_kv) * {sms}"
        ),
    }
    coordinates = {
        "rows": "log2(q_tokens)",
        "scores_a_row": "log2(pairs / q_tokens)",
        "longest_over_mean": "log2(max_kv * q_tokens / pairs) / 2",
    }
    few = f"0 if q_tokens <= {_ROWS_AN_SM * sms} else 1"
    return Formulas(values, _FEATURES, coordinates, few, {"log2": log2}, regimes=frozenset({0, 1}))
