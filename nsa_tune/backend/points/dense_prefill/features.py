"""Features of dense attention: those of expanded MHA, and how absorbed kernels spread tiles.

Absorbed kernels pack heads: a tile is 64 (query, head) pairs of one sequence, and goes through all
keys that its last query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2

from nsa_tune.backend.points import schedules
from nsa_tune.backend.points.prefill import features as prefill
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import FeatureFunctions, Setting

_TILE = 64
"""(query, head) pairs of a tile: FlashAttention-3 for values of 512, FlashMLA, FlashInfer."""
_FULL, _NEVER_SPLIT, _MOST_PARTS = 0.8, 4, 128
"""Tiles an SM from which FlashAttention-3 splits none, blocks of keys up to which it splits none,
and the most parts of one (`num_splits_heuristic`)."""
_ALIKE = 0.95
"""Share of the longest tile's keys from which tiles end together, in whole waves."""
_PIECES = ((8, 32), (16, 64), (32, 128), (64, 192))
"""Keys of FlashInfer's largest piece, by the even share up to which it is that; then whole 256."""
_FEW_TILES = 16
"""Tiles of a sequence up to which the pieces of each are counted; of more, half a one is open."""


FA3 = (
    "absorbed_tiles", "absorbed_even_keys", "absorbed_busiest_keys", "absorbed_merged_rows",
    "absorbed_parts",
)  # fmt: skip
FLASH_MLA = ("flash_mla_busiest_keys", "flash_mla_merged_rows", "flash_mla_parts")
FLASHINFER = (
    "flashinfer_busiest_keys", "flashinfer_merged_rows", "flashinfer_waves", "flashinfer_parts"
)  # fmt: skip
"""What each absorbed kernel makes of a batch: tiles of 64 (query, head) pairs, keys of an SM if all
are shared alike and of the busiest one, partial outputs of a row that are merged, whole waves of
pieces, and parts of the longest sequence where it is split."""
ABSORBED = ("longest_keys", *FA3, *FLASH_MLA, *FLASHINFER)
OF_FA3 = ("rows", "gemm_rows", *FA3)
OF_FLASH_MLA = ("rows", "gemm_rows", *FLASH_MLA)
OF_FLASHINFER = ("rows", "gemm_rows", *FLASHINFER)
OF_TORCH = ("rows", "attended_pairs")


def features(setting: Setting) -> FeatureFunctions:
    """The features of an extend, and where it lies: octaves of its q tokens, half octaves of the
    others. That nothing is read back without a prefix is a term (`prefix_keys`)."""
    common, absorbed = prefill.common_terms(setting), absorbed_terms(setting)
    return FeatureFunctions(
        (*prefill.Terms._fields, *ABSORBED),
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


def absorbed_terms(setting: Setting) -> Callable[[Batch], tuple[float, ...]]:
    """A function of a batch: the numbers called `ABSORBED`."""
    sms, heads = schedules.sms_of(setting), setting.heads
    width, each = max(_TILE // heads, 1), -(-heads // _TILE)

    def terms(batch: Batch) -> tuple[float, ...]:
        tiles, pairs = prefill.query_tiles(batch, width)
        tiles, keys = tiles * each, pairs / width * each
        return (
            float(batch.max_kv), float(tiles), keys / sms, *_fa3(batch, tiles, keys, heads, sms),
            *_flash_mla(batch, keys, heads, sms), *_flashinfer(batch, heads, sms),
        )  # fmt: skip

    return terms


def _fa3(batch: Batch, tiles: int, keys: float, heads: int, sms: int) -> tuple[float, float, float]:
    """Into how many parts it splits the longest tile: none gets much more than an SM's share of all
    blocks (`prepare_varlen_num_blocks_kernel`), and there are no more than fill waves well, if all
    sequences had as many tiles as the longest new one (`num_splits_heuristic`). A tile that is not
    full counts as a part of one there."""
    blocks, longest = -(-batch.max_kv // schedules.BLOCK), max(batch.new_lens or (1,))
    longest = max(longest, -(-batch.q_tokens // batch.batch_size))
    alike = -(-batch.batch_size * longest * heads // _TILE)
    parts = 1
    if alike < _FULL * sms and blocks > _NEVER_SPLIT:
        share = -(-(keys / schedules.BLOCK + tiles / 2) * 11 // (10 * sms))
        most = schedules.filling_parts(alike, sms, min(blocks, sms, _MOST_PARTS))
        parts = max(min(int(-(-blocks // share)), most), 1)
    # So many tiles like the longest would be as much work.
    part, equal = -(-blocks // parts), keys / batch.max_kv
    if equal > _ALIKE * tiles:
        busiest = float(-(-tiles * parts // sms) * part)
    else:
        # The longest come first, so that the shortest fill what is left.
        busiest = max(equal * parts * part / sms, float(part))
    split = float(parts) if parts > 1 else 0.0
    return busiest * schedules.BLOCK, batch.q_tokens * split, split


def _flash_mla(batch: Batch, keys: float, heads: int, sms: int) -> tuple[float, float, float]:
    """Each tile of one sequence's queries takes as many SMs as there are for it, which share the
    blocks of all sequences, and `FIXED_BLOCKS` a piece of one on top; with more tiles than SMs it
    goes through all sequences by itself."""
    count, fixed = batch.batch_size, schedules.FIXED_BLOCKS
    queries = -(-batch.q_tokens // count)
    tiles = -(-queries * heads // _TILE)
    blocks = sum(
        same * (-(-(prefix + new) // schedules.BLOCK) + fixed)
        for prefix, new, same in schedules.sequences(batch)
    )
    if tiles > sms // 2:
        # The last queries see the most keys, and theirs come last.
        busiest = schedules.makespan(tiles, keys, float(blocks * schedules.BLOCK), sms, 1.0)
        return busiest, 0.0, 0.0
    piece = -(-blocks // (sms // tiles))
    part = piece + fixed
    merged = batch.q_tokens * (blocks / count - fixed) / piece if blocks > part * count else 0
    parts = -(-batch.max_kv // schedules.BLOCK) / piece
    return min(part, blocks) * schedules.BLOCK, float(merged), parts if parts > 1 else 0.0


def _flashinfer(batch: Batch, heads: int, sms: int) -> tuple[float, float, float, float]:
    """Tiles in pieces of at most an even share of keys, rounded up, one after the other to the SM
    (or pair) that has the least (scheduler.cuh, MLAPlan)."""
    pair = 2 if batch.q_tokens * heads > _TILE * batch.batch_size else 1
    slots, width = sms // pair or 1, pair * _TILE / heads
    shapes, total = [], 0.0
    for prefix, new, same in schedules.sequences(batch):
        tiles = -(-new * heads // (pair * _TILE))
        keys = tiles * (prefix + width * (tiles - 1) / 2) + new
        shapes.append((prefix + new, new, same, tiles, keys))
        total += same * keys
    even = -(-total // slots)
    piece = next((most for least, most in _PIECES if even <= least), -(-even // 256) * 256)
    pieces = merged = 0.0
    for kv, new, same, tiles, keys in shapes:
        if tiles <= _FEW_TILES:
            ends = [min(kv - new + int(width * (tile + 1)), kv) for tile in range(tiles)]
            each = sum([-(-end // piece) for end in ends])
        else:
            each = max(keys / piece + tiles / 2, tiles)
        pieces += same * (each if kv > piece else tiles)
        merged += same * new * each / tiles if kv > piece else 0.0
    longest = float(min(piece, batch.max_kv))
    busiest = schedules.makespan(pieces, total, longest, slots, schedules.LONGEST_FIRST_TAIL)
    parts = -(-batch.max_kv // piece)
    return max(busiest, longest), merged, -(-pieces // slots), parts if parts > 1 else 0.0
