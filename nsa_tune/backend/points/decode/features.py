"""Features of a decode or verify batch: rows, the pairs that sparse attention computes, and how
kernels that split selections divide them."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

from nsa_tune.backend.points import splits
from nsa_tune.backend.points.prefill.features import (
    attended_by_length,
    attended_pairs,
    pairs_in_waves,
    wave_of,
)
from nsa_tune.backend.types.formula import Formulas, Value
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting

_IN_TURN = "attended_pairs_in_waves_to_the_longest"
OF_PAIRS = ("rows", "attended_pairs", _IN_TURN, "waves", "distinct_keys")
OF_FLASHMLA_SPARSE = ("rows", "pairs_in_steps", "steps_in_turn", "waves", "distinct_keys")
# Pairs are not offered where the busiest SM's work is. Over many rows both grow alike: part of the
# steps would be charged to pairs.
OF_FA3 = ("rows", *splits.OF_FA3)
OF_FLASHMLA_KV = ("attended_pairs", "distinct_keys", *splits.OF_FLASHMLA_KV)
OF_FLASHMLA_GROUPED = ("attended_pairs", "distinct_keys", *splits.OF_FLASHMLA_GROUPED)
OF_TRITON = (*OF_PAIRS, *splits.OF_TRITON)
OF_TRITON_SPLIT = splits.OF_TRITON_SPLIT
_OF_ALL = (*OF_PAIRS, *OF_FLASHMLA_SPARSE)
_OF_BF16 = tuple(dict.fromkeys((*_OF_ALL, *OF_FA3, *OF_TRITON, *OF_TRITON_SPLIT)))
_OF_PACKED = tuple(dict.fromkeys((*_OF_ALL, *OF_FLASHMLA_KV, *OF_FLASHMLA_GROUPED)))


def formulas(setting: Setting) -> Formulas:
    """The features of a batch, and where it lies: octaves of its rows and of the pairs a row."""
    topk, wave = setting.profile.index_topk, wave_of(setting)
    values = {
        **attended_pairs(topk),
        "distinct_keys": splits.DISTINCT_KEYS,
        **pairs_in_waves("attended_pairs", f"({topk}.0 if max_kv > {topk} else max_kv)", wave),
    }
    values[_IN_TURN] = splits.in_turn(values[_IN_TURN].formula, topk, wave)
    values |= _steps(topk, wave)
    if setting.layout is KVLayout.BF16:
        values |= splits.fa3(setting) | splits.triton(setting) | splits.triton_split(setting)
        features = _OF_BF16
    else:
        # Over packed pools FlashMLA's kernels are so much faster than Triton's that its steps
        # decide nothing, and each feature costs time in a plan.
        values |= splits.flashmla_kv(setting) | splits.flashmla_grouped(setting)
        features = _OF_PACKED
    coordinates = {
        "rows": "log2(q_tokens)",
        "attended_per_row": "log2(attended_pairs / rows)",
        "mean_context": "log2(kv_tokens / batch_size) / 4",
    }
    functions: dict[str, Callable[..., Any]] = {
        "attended_by_length": attended_by_length,
        "keys_until_the_end": splits.keys_until_the_end,
        "log2": log2,
        **(splits.fa3_functions(setting) if setting.layout is KVLayout.BF16 else {}),
    }
    return Formulas(values, features, coordinates, functions=functions)


def _steps(topk: int, wave: int) -> dict[str, Value]:
    """The pairs, if each row's keys are rounded up to whole steps; all, and in turn."""
    about = f"{_IN_TURN} + more_in_steps"
    sums = (
        f"(waves * longest_in_steps * {wave}.0 "
        f"if q_tokens <= {wave} or max_kv <= {splits.FLASHMLA_STEP} "
        f"else {_IN_TURN} * pairs_in_steps / attended_pairs if kv_tokens == batch_size * max_kv "
        f"else {about})"
    )
    return {
        **splits.long_rows(topk),
        **splits.pairs_in_steps(topk),
        **splits.steps_in_turn(sums, about, wave),
    }
