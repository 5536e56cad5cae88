"""Features of dense attention: those of expanded MHA, and how absorbed kernels spread tiles.

Absorbed kernels pack heads: a tile is 64 (query, head) pairs of one sequence, and goes through all
keys that its last query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nsa_tune.backend.points import schedules
from nsa_tune.backend.points.prefill import features as prefill
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import FeatureFunctions, Setting

_TILE = 64
"""(query, head) pairs of a tile: FlashAttention-3 for values of 512, FlashMLA, FlashInfer."""
_FULL, _NEVER_SPLIT, _MOST_PARTS = 0.8, 4, 128
"""Tiles an SM from which FlashAttention-3 splits none, blocks of keys up to which it splits none,
and the most parts of one (`num_splits_heuristic`)."""
_PIECES = ((8, 32), (16, 64), (32, 128), (64, 192))
"""Keys of FlashInfer's largest piece, by the even share up to which it is that; then whole 256."""
_GROUPS = 8
"""Of a sequence's tiles so many different ones are looked at, at most."""
_BEGUN = 96
"""Keys' worth of time for beginning a piece."""
_WIDE, _DEALT = 128, 4
"""Queries of MHA's tile, and tiles an SM up to which they are dealt one by one."""

SGL_FA3 = ("gemm_keys", "tile_waves", "sgl_fa3_busiest_pairs")
FLASHINFER_FA3 = ("gemm_keys", "tile_waves", "flashinfer_fa3_busiest_pairs")
FA3 = ("absorbed_busiest_keys", "absorbed_merged_rows", "absorbed_parts")
FLASH_MLA = ("flash_mla_busiest_keys", "flash_mla_merged_rows", "flash_mla_parts")
FLASHINFER = (
    "flashinfer_busiest_keys", "flashinfer_merged_rows", "flashinfer_parts", "flashinfer_merges"
)  # fmt: skip
"""What each absorbed kernel makes of a batch: keys of the busiest SM, partial outputs of a row that
are merged, and parts of the longest sequence where it is split."""
ABSORBED = ("longest_keys", "read_keys", *FA3, *FLASH_MLA, *FLASHINFER)
OF_FA3 = ("rows", "gemm_rows", "read_keys", *FA3)
OF_FLASH_MLA = ("rows", "gemm_rows", "read_keys", *FLASH_MLA)
OF_FLASHINFER = ("rows", "gemm_rows", "read_keys", *FLASHINFER)
OF_TORCH = ("rows", "attended_pairs")


def features(setting: Setting) -> FeatureFunctions:
    """The features of an extend, and where it lies: octaves of its q tokens, half octaves of the
    others. That nothing is read back without a prefix is a term (`prefix_keys`)."""
    common, absorbed = prefill.terms_of(setting), absorbed_terms(setting)

    def computed(batch: Batch) -> tuple[float, ...]:
        expanded = prefill.Terms(*common(batch))
        return (*expanded, *_expanded(batch, expanded, setting), *absorbed(batch))

    names = (*prefill.Terms._fields, SGL_FA3[-1], FLASHINFER_FA3[-1], *ABSORBED)
    return FeatureFunctions(names, computed, prefill.features(setting).coordinates)


def _expanded(batch: Batch, of: prefill.Terms, setting: Setting) -> tuple[float, float]:
    """Pairs of FlashAttention-3's busiest SM. Sequences are sorted: by the keys of their first tile
    in sglang-kernel, which deals all heads of one before the next (flash_prepare_scheduler.cu), by
    all keys in FlashInfer, which deals one head of all (scheduler.cuh, PrefillSM90Plan)."""
    heads, sms, dealt = setting.heads, schedules.sms_of(setting), []
    if of.query_tiles * heads > _DEALT * sms:
        return of.tile_makespan_pairs, of.tile_makespan_pairs
    for keys, at_once in ((lambda one: -one[0], heads), (lambda one: -one[0] - one[1], 1)):
        pieces = [
            (end * _WIDE, count * at_once)
            for prefix, new, same in sorted(schedules.sequences(batch), key=keys)
            for end, count in _tiles(-(-new // _WIDE), prefix, new, _WIDE, same)
        ]
        dealt.append(schedules.dealt(pieces * (heads // at_once), sms))
    return dealt[0], dealt[1]


def absorbed_terms(setting: Setting) -> Callable[[Batch], tuple[float, ...]]:
    """A function of a batch: the numbers called `ABSORBED`."""
    sms, heads = schedules.sms_of(setting), setting.heads

    def terms(batch: Batch) -> tuple[float, ...]:
        return (
            float(batch.max_kv), float(batch.kv_tokens), *_fa3(batch, heads, sms),
            *_flash_mla(batch, heads, sms), *_flashinfer(batch, heads, sms),
        )  # fmt: skip

    return terms


def _fa3(batch: Batch, heads: int, sms: int) -> tuple[float, float, float]:
    """Parts of a sequence's tiles have not much more than an SM's share of all blocks
    (`prepare_varlen_num_blocks_kernel`), and there are no more than fill waves well, if all rows
    were one sequence's (`num_splits_heuristic`). Sequences of the longest parts come first."""
    longest, rows = -(-batch.max_kv // schedules.BLOCK), -(-batch.q_tokens * heads // _TILE)
    most = 1
    if rows < _FULL * sms and longest > _NEVER_SPLIT:
        most = schedules.filling_parts(rows, sms, min(longest, sms, _MOST_PARTS))
    shapes = [
        (-(-(prefix + new) // schedules.BLOCK), -(-new * heads // _TILE), prefix, new, same)
        for prefix, new, same in schedules.sequences(batch)
    ]
    total = sum([blocks * tiles * same for blocks, tiles, _, _, same in shapes])
    share = -(-total * 11 // (10 * sms))
    runs, merged, split = [], 0, 0
    for blocks, tiles, prefix, new, same in shapes:
        parts = max(min(-(-blocks // share), most), 1)
        runs.append((-(-blocks // parts) - tiles, tiles, prefix, new, same, parts))
        if parts > 1:
            merged, split = merged + new * same * parts, max(split, parts)
    pieces = [
        (_length(end / parts), count * parts)
        for _, tiles, prefix, new, same, parts in sorted(runs, reverse=True)
        for end, count in _tiles(tiles, prefix, new, _TILE / heads, same)
    ]
    return schedules.dealt(pieces, sms), float(merged), float(split)


def _length(keys: float) -> float:
    """Keys' worth of time that a piece of so many takes."""
    return -(-keys // schedules.BLOCK) * schedules.BLOCK + _BEGUN


def _tiles(
    tiles: int, prefix: int, new: int, width: float, same: int
) -> Iterator[tuple[float, int]]:
    """(keys, how many) of the tiles of `same` sequences, the last ones first; of many the means of
    some together."""
    groups, begun = min(tiles, _GROUPS), 0
    for i in range(1, groups + 1):
        end = tiles * i // groups
        seen = width * (tiles - (begun + end - 1) / 2)
        yield prefix + min(seen, new), (end - begun) * same
        begun = end


def _flash_mla(batch: Batch, heads: int, sms: int) -> tuple[float, float, float]:
    """Each tile of one sequence's queries takes as many SMs as there are for it, which share the
    blocks of all sequences, and `FIXED_BLOCKS` a piece of one on top; with more tiles than SMs it
    goes through all sequences by itself."""
    count, fixed = batch.batch_size, schedules.FIXED_BLOCKS
    queries = -(-batch.q_tokens // count)
    tiles = -(-queries * heads // _TILE)
    if tiles > sms // 2:
        # The last queries see the most keys, and theirs come last.
        last = list(_tiles(tiles, batch.prefix_tokens, batch.q_tokens, _TILE * count / heads, 1))
        pieces = [(_length(end / count) * count, each) for end, each in reversed(last)]
        return schedules.dealt(pieces, sms), 0.0, 0.0
    each = [
        -(-(prefix + new) // schedules.BLOCK)
        for prefix, new, same in schedules.sequences(batch)
        for _ in range(same)
    ]
    blocks = sum(each) + fixed * count
    piece = -(-blocks // (sms // tiles))
    part = piece + fixed
    merged = batch.q_tokens * (blocks / count - fixed) / piece if blocks > part * count else 0
    parts = -(-batch.max_kv // schedules.BLOCK) / piece
    return _fullest(each, part), float(merged), parts if parts > 1 else 0.0


def _fullest(sequences: list[int], part: int) -> float:
    """Keys of the fullest of FlashMLA's parts, into which its schedule deals sequences of so many
    blocks, one behind the other (`get_mla_metadata_kernel`)."""
    fixed, most, keys, left = schedules.FIXED_BLOCKS, 0, 0, part
    for rest in sequences:
        while rest + fixed > left:
            if left > fixed:
                keys += (left - fixed) * schedules.BLOCK + _BEGUN
                rest -= left - fixed
            most, keys, left = max(most, keys), 0, part
        keys += rest * schedules.BLOCK + _BEGUN
        left -= rest + fixed
    return float(max(most, keys))


def _flashinfer(batch: Batch, heads: int, sms: int) -> tuple[float, float, float, float]:
    """Tiles in pieces of at most an even share of keys, rounded up, dealt in the batch's order to
    the SM (or pair) that has the least (scheduler.cuh, MLAPlan)."""
    pair = 2 if batch.q_tokens * heads > _TILE * batch.batch_size else 1
    slots, width = sms // pair or 1, pair * _TILE / heads
    runs = [
        (end, count, min(width, new))
        for prefix, new, same in schedules.sequences(batch)
        for end, count in _tiles(-(-new * heads // (pair * _TILE)), prefix, new, width, same)
    ]
    even = -(-sum(end * count for end, count, _ in runs) // slots)
    piece = next((most for least, most in _PIECES if even <= least), -(-even // 256) * 256)
    pieces, merged = [], 0.0
    for end, count, rows in runs:
        if end <= piece:
            pieces.append((_length(end), count))
            continue
        # No more tiles than there are slots are split. The rest of one comes before the next one.
        whole, rest = divmod(end, piece)
        pieces += [(_length(piece), int(whole)), (_length(rest), 1 if rest else 0)] * count
        merged += count * rows * -(-end // piece)
    parts = -(-batch.max_kv // piece)
    if parts == 1:
        return schedules.dealt(pieces, slots), 0.0, 0.0, 0.0
    return schedules.dealt(pieces, slots), merged, float(parts), 1.0
