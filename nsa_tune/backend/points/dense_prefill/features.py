"""Features of dense attention: those of expanded MHA, and how absorbed kernels spread tiles.

Absorbed kernels pack heads: a tile is 64 (query, head) pairs of one sequence, and goes through all
keys that its last query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import NamedTuple

from nsa_tune.backend.points import schedules
from nsa_tune.backend.points.prefill import features as prefill
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import FeatureFunctions, Setting

_TILE = 64
"""(query, head) pairs of a tile: FlashAttention-3 for values of 512, FlashMLA, FlashInfer."""
_FULL = 0.8
"""Tiles an SM from which FlashAttention-3 splits none (`num_splits_heuristic`)."""


class AbsorbedTerms(NamedTuple):
    """What absorbed kernels make of a batch."""

    absorbed_tiles: float
    """Tiles of 64 (query, head) pairs."""
    absorbed_even_keys: float
    """Keys that each SM goes through if all are shared alike."""
    absorbed_busiest_keys: float
    """Keys of the busiest SM, where only few tiles are split."""
    absorbed_merged_rows: float
    """Partial outputs that are merged, a row and a part each."""


OF_FA3 = ("rows", "gemm_rows", *AbsorbedTerms._fields)
OF_BALANCED = ("rows", "gemm_rows", "absorbed_tiles", "absorbed_even_keys")
OF_TORCH = ("rows", "attended_pairs")


def features(setting: Setting) -> FeatureFunctions:
    """The features of an extend, and where it lies: octaves of its q tokens, half octaves of the
    others. That nothing is read back without a prefix is a term (`prefix_keys`)."""
    common, absorbed = prefill.common_terms(setting), absorbed_terms(setting)
    return FeatureFunctions(
        (*prefill.Terms._fields, *AbsorbedTerms._fields),
        lambda batch: (*common(batch), *absorbed(batch)),
        _coordinates,
    )


def _coordinates(batch: Batch) -> tuple[float, ...]:
    return (
        log2(batch.q_tokens),
        log2(batch.kv_tokens) / 2,
        log2(batch.pairs / batch.q_tokens) / 2,
        log2(batch.batch_size) / 2,
    )


def absorbed_terms(setting: Setting) -> Callable[[Batch], AbsorbedTerms]:
    """A function of a batch."""
    sms = schedules.sms_of(setting)
    width, each = max(_TILE // setting.heads, 1), -(-setting.heads // _TILE)

    def terms(batch: Batch) -> AbsorbedTerms:
        tiles, pairs = prefill.query_tiles(batch, width)
        tiles, keys = tiles * each, pairs / width * each
        blocks = -(-batch.max_kv // schedules.BLOCK)
        parts = _parts(tiles, keys, batch.max_kv, sms)
        # So many tiles like the longest would be as much work.
        part, alike = -(-blocks // parts), keys / batch.max_kv
        busiest = schedules.makespan(tiles * parts, alike * parts * part, float(part), sms)
        merged = float(batch.q_tokens * parts) if parts > 1 else 0.0
        return AbsorbedTerms(float(tiles), keys / sms, busiest * schedules.BLOCK, merged)

    return terms


def _parts(tiles: int, keys: float, longest: int, sms: int) -> int:
    """Into how many parts FlashAttention-3 splits the longest tile: none gets much more than an
    SM's share of all blocks (`prepare_varlen_num_blocks_kernel`)."""
    if tiles >= _FULL * sms:
        return 1
    blocks = keys / schedules.BLOCK + tiles / 2
    share = -(-blocks * 11 // (10 * sms))
    return int(max(min(-(-longest // (share * schedules.BLOCK)), sms), 1))
