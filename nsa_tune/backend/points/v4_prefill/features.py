"""How much work a V4 prefill batch is: the features that an arm's time is a weighted sum of."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from nsa_tune.backend.libraries.flash_mla.limits import split_parts
from nsa_tune.backend.points.schedules import makespan, sequences, wave_of
from nsa_tune.backend.points.v4_prefill.work import Run, runs_of_rows, split_schedule
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import FeatureFunctions, Setting
from nsa_tune.backend.types.profiles import ModelProfile


class Terms(NamedTuple):
    """What a layer of one compression ratio computes."""

    rows: float
    gathered_tokens: float
    """Window and compressed tokens that `sparse_fwd` copies."""
    compresses: float
    """1 where there is a compressed token, else 0: without any a kernel less is launched."""
    makespan_steps: float
    """Steps of keys that a slot goes through until `sparse_fwd`'s last row ends; beginning a row
    counts as one."""
    max_split_blocks: float
    """Blocks of the fullest part of `with_kvcache`'s schedule; beginning a row counts as one."""
    splits_rows: float
    """1 where the schedule splits any row, else 0."""


OF_SPARSE_FWD = ("rows", "gathered_tokens", "compresses", "makespan_steps")
OF_WITH_KVCACHE = ("rows", "max_split_blocks", "splits_rows")


def features(setting: Setting, ratio: int) -> FeatureFunctions:
    """The features of a batch in a layer of compression ratio `ratio`, and where it lies: octaves
    of its q tokens, half octaves of the others."""
    profile, parts, slots = setting.profile, split_parts(setting), wave_of(setting)

    def computed(batch: Batch) -> tuple[float, ...]:
        most = extra_width(profile, ratio, batch.max_kv)
        runs = [
            run
            for prefix, new, count in sequences(batch)
            for run in runs_of_rows(prefix, new, count, ratio, most, profile.window)
        ]
        blocks, splits = split_schedule(runs, parts)
        return Terms(
            rows=float(batch.q_tokens),
            gathered_tokens=float(gathered_tokens(batch, profile.window, ratio)),
            compresses=1.0 if batch.max_kv >= ratio else 0.0,
            makespan_steps=_makespan_steps(runs, slots),
            max_split_blocks=blocks,
            splits_rows=float(splits),
        )

    def coordinates(batch: Batch) -> tuple[float, ...]:
        attended = attended_pairs(batch, profile, ratio)
        return (
            log2(batch.q_tokens),
            log2(gathered_tokens(batch, profile.window, ratio)) / 2,
            log2(attended / batch.q_tokens) / 2,
            log2(batch.batch_size) / 2,
        )

    return FeatureFunctions(Terms._fields, computed, coordinates)


def _makespan_steps(runs: list[Run], slots: int) -> float:
    rows = sum(run.rows for run in runs)
    steps = sum(run.rows * (run.steps + 1) for run in runs)
    return makespan(rows, steps, max(run.steps for run in runs) + 1, slots)


def extra_width(profile: ModelProfile, ratio: int, max_kv: int) -> int:
    """The most compressed tokens that a query attends to: ratio 4 selects index_topk of them, ratio
    128 attends to all."""
    return profile.index_topk if ratio == 4 else max(max_kv // ratio, 1)


def gathered_tokens(batch: Batch, window: int, ratio: int) -> int:
    """Window and compressed tokens that [window; extra] is made of."""
    if batch.kv_lens is None:
        return most_gathered(batch, window, ratio)
    return sum(
        count * (min(prefix + new, new + window - 1) + (prefix + new) // ratio)
        for prefix, new, count in sequences(batch)
    )


def most_gathered(batch: Batch, window: int, ratio: int) -> int:
    """The same by a batch's sums: at least as many."""
    in_window = min(batch.kv_tokens, batch.q_tokens + batch.batch_size * (window - 1))
    return in_window + batch.kv_tokens // ratio


def attended_pairs(batch: Batch, profile: ModelProfile, ratio: int) -> float:
    """Pairs of queries and keys; from sums alone as if all sequences were equal."""
    most = extra_width(profile, ratio, batch.max_kv)
    if batch.kv_lens is None:
        count = batch.batch_size
        each = batch.prefix_tokens / count, batch.q_tokens / count
        return count * _pairs(*each, ratio, most, profile.window)
    return sum(
        count * _pairs(prefix, new, ratio, most, profile.window)
        for prefix, new, count in sequences(batch)
    )


def _pairs(prefix: float, new: float, ratio: int, most: int, window: int) -> float:
    """Pairs of queries and keys of one sequence."""
    end = prefix + new
    in_window = _seen(end, 1, window) - _seen(prefix, 1, window)
    return in_window + _seen(end, ratio, most) - _seen(prefix, ratio, most)


def _seen(tokens: float, ratio: int, most: int) -> float:
    """Sum of min(i // ratio, most) over the first `tokens` positions i = 1, 2, ..."""
    below = min(tokens, ratio * most)
    whole = below // ratio
    return (
        ratio * whole * (whole - 1) / 2
        + whole * (below - ratio * whole + 1)
        + most * (tokens - below)
    )
