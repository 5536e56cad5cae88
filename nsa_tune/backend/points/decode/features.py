"""Features of a decode or verify batch: rows, the pairs that sparse attention computes, and how
kernels that split selections divide them."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import NamedTuple

from nsa_tune.backend.points import schedules
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import FeatureFunctions, Setting


class Terms(NamedTuple):
    """What is the same for every KV layout."""

    rows: float
    """Query tokens."""
    attended_pairs: float
    """(query, key) pairs of sparse attention."""
    step_pairs: float
    """The same, if each row's keys are rounded up to whole steps of FlashMLA."""
    makespan_keys: float
    """Of these, keys that a slot goes through until the last row ends."""
    triton_keys_per_sm: float
    """Keys that an SM goes through in the Triton programs that share a row's selection; empty
    places of the selection too, so that short contexts take as long."""


class FlashMlaTerms(NamedTuple):
    """What FlashMLA's decode kernel makes of the rows of a packed pool."""

    max_split_blocks: float
    """Blocks of the fullest part of its schedule."""
    grouped_max_split_blocks: float
    """The same with a sequence's queries in one row."""


OF_PAIRS = ("rows", "attended_pairs", "makespan_keys")
OF_FLASHMLA_SPARSE = ("rows", "step_pairs", "makespan_keys")
OF_FA3 = ("rows", *schedules.Fa3Terms._fields)
OF_FLASHMLA_KV = ("attended_pairs", "max_split_blocks")
OF_FLASHMLA_GROUPED = ("attended_pairs", "grouped_max_split_blocks")
OF_TRITON = ("attended_pairs", "triton_keys_per_sm")
OF_TRITON_SPLIT = ("rows", "split_keys_per_sm")


def features(setting: Setting) -> FeatureFunctions:
    """The features of a batch, and where it lies: octaves of its rows and of the pairs a row."""
    topk, wave = setting.profile.index_topk, schedules.wave_of(setting)
    triton = schedules.triton_keys_per_sm(setting)
    names, schedule = _schedule(setting)

    def computed(batch: Batch) -> tuple[float, ...]:
        attended = schedules.attended_pairs(batch, topk)
        pairs, longest = schedules.step_pairs(batch, topk, attended)
        rows = batch.q_tokens
        makespan = schedules.makespan(rows, pairs, longest, wave)
        terms = Terms(rows, attended, pairs, makespan, triton(rows))
        return (*terms, *schedule(batch, attended))

    def coordinates(batch: Batch) -> tuple[float, ...]:
        attended = schedules.attended_pairs(batch, topk)
        return (
            log2(batch.q_tokens),
            log2(attended / batch.q_tokens),
            log2(batch.kv_tokens / batch.batch_size) / 4,
        )

    return FeatureFunctions((*Terms._fields, *names), computed, coordinates)


def _schedule(
    setting: Setting,
) -> tuple[tuple[str, ...], Callable[[Batch, float], tuple[float, ...]]]:
    """Names, and a function of a batch and its attended pairs, of what only the kernels over this
    layout of a pool do."""
    if setting.layout is not KVLayout.BF16:
        blocks, grouped = schedules.flash_mla_blocks(setting), schedules.grouped_blocks(setting)
        return (
            FlashMlaTerms._fields,
            lambda batch, attended: (blocks(batch.q_tokens), grouped(batch)),
        )
    fa3, split = schedules.fa3(setting), schedules.split_triton_keys_per_sm(setting)
    # The last of `triton_split`, which has more parts than `triton`.
    names = (*schedules.Fa3Terms._fields, "split_keys_per_sm")
    return names, lambda batch, attended: (*fa3(batch, attended), split(batch.q_tokens))
