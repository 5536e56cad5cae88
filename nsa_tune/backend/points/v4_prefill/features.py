"""How much work a V4 prefill batch is: the features that an arm's time is a weighted sum of."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

from nsa_tune.backend.libraries.flash_mla.limits import split_parts
from nsa_tune.backend.points.prefill.features import wave_of
from nsa_tune.backend.points.sequences import FUNCTIONS, by_sequences, runs
from nsa_tune.backend.points.v4_prefill.work import Work, work_of
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.formula import Formulas, Value, larger, smaller
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import ModelProfile

_OF_COPY = ("batch_size", "gathered_tokens", "compresses", "steps", "steps_of_the_busiest")
_OF_POOLS = ("blocks_of_the_fullest", "splits_rows", "parts_merged")
OF_SPARSE_FWD = ("rows", *_OF_COPY)
OF_WITH_KVCACHE = ("rows", *_OF_POOLS)


def extra_width(profile: ModelProfile, ratio: int) -> str:
    """The formula of the most compressed tokens that a query attends to: ratio 4 selects
    index_topk of them, ratio 128 attends to all."""
    return str(profile.index_topk) if ratio == 4 else larger(f"max_kv // {ratio}", "1")


def gathered(batch: Batch, window: int, ratio: int) -> tuple[int, int]:
    """Window tokens and compressed tokens that [window; extra] is made of, by the lengths."""
    in_window = compressed = 0
    for prefix, new, count in runs(batch):
        in_window += count * min(prefix + new, new + window - 1)
        compressed += count * ((prefix + new) // ratio)
    return in_window, compressed


def most_gathered(window: int, ratio: int) -> str:
    """The formula of both together by a batch's sums: at least as many."""
    most = smaller("kv_tokens", f"(q_tokens + batch_size * {window - 1})")
    return f"({most} + kv_tokens // {ratio})"


def _seen(tokens: float, ratio: int, most: int) -> float:
    """Sum of min(i // ratio, most) over the first `tokens` positions i = 1, 2, ..."""
    below = min(tokens, ratio * most)
    whole = below // ratio
    return (
        ratio * whole * (whole - 1) / 2
        + whole * (below - ratio * whole + 1)
        + most * (tokens - below)
    )


def _pairs(prefix: float, new: float, ratio: int, most: int, window: int) -> float:
    """Pairs of queries and keys of one sequence."""
    end = prefix + new
    in_window = _seen(end, 1, window) - _seen(prefix, 1, window)
    return in_window + _seen(end, ratio, most) - _seen(prefix, ratio, most)


def _pairs_by_length(batch: Batch, ratio: int, most: int, window: int) -> float:
    return sum(
        count * _pairs(prefix, new, ratio, most, window) for prefix, new, count in runs(batch)
    )


def formulas(setting: Setting, ratio: int) -> Formulas:
    """The features of a batch in a layer of compression ratio `ratio`, and where it lies: octaves
    of its q tokens, half octaves of the others."""
    profile = setting.profile
    window, extra = profile.window, extra_width(profile, ratio)
    equal = f"pairs_of(prefix_tokens / batch_size, q_tokens / batch_size, {ratio}, extra, {window})"
    work = f"work_of({{}}, {ratio}, extra, {window}, {split_parts(setting)}, {wave_of(setting)})"
    values = {
        "extra": Value(extra),
        "gathered_tokens": Value(
            most_gathered(window, ratio), f"sum(gathered(batch, {window}, {ratio}))"
        ),
        # Without a compressed token none are gathered, which is a kernel less.
        "compresses": Value(f"1.0 if max_kv >= {ratio} else 0.0"),
        "index_columns": Value(f"q_tokens * ({window} + extra)"),
        # From sums alone as if all sequences were equal.
        "attended_pairs": Value(
            f"batch_size * {equal}", f"pairs_by_length(batch, {ratio}, extra, {window})"
        ),
        ", ".join(Work._fields): by_sequences(work),
    }
    features = ("rows", *_OF_COPY, *_OF_POOLS)
    coordinates = {
        "q_tokens": "log2(q_tokens)",
        "gathered_tokens": "log2(gathered_tokens) / 2",
        "attended_per_query": "log2(attended_pairs / q_tokens) / 2",
        "batch_size": "log2(batch_size) / 2",
    }
    functions: dict[str, Callable[..., Any]] = {
        **FUNCTIONS,
        "gathered": gathered,
        "log2": log2,
        "pairs_by_length": _pairs_by_length,
        "pairs_of": _pairs,
        "sum": sum,
        "work_of": work_of,
    }
    return Formulas(values, features, coordinates, functions=functions)
