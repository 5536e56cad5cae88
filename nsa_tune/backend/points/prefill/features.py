"""How much work a prefill batch is: the features that an arm's time is a weighted sum of.

Sums of tokens are not enough. Dense attention computes whole tiles of queries: 64 sequences of one
new token cost 64 tiles. Sparse attention runs one query on one SM (or two): a batch costs whole
waves of queries (docs/policy.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from math import log2
from typing import NamedTuple

from nsa_tune.backend.points import schedules
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import FeatureFunctions, Setting

_TILE = 128
"""Queries that FlashAttention-3 computes at once for head dims of 192 and 128."""
_KEYS = 64
"""Keys of its block for values of 256 channels, as far as short sequences tell."""
_FEWEST_KEYS = 128
"""Keys of the smallest part into which FlashAttention-2 splits them."""


class Terms(NamedTuple):
    """What is the same for every KV layout."""

    rows: float
    """New tokens."""
    gemm_rows: float
    """The same for a matrix product, which computes a whole tile at least."""
    gemm_keys: float
    """Kv tokens likewise: kv_b_proj expands all of them."""
    sequences: float
    prefix_keys: float
    """Kv tokens where a prefix must be read back, else 0."""
    attended_pairs: float
    """(query, key) pairs of sparse attention."""
    makespan_keys: float
    """Keys in whole steps that a slot goes through until FlashMLA's last row ends."""
    longest_keys: float
    """Keys of the longest row."""
    longest_union: float
    """The same of four neighbouring rows together."""
    union_makespan_keys: float
    """Keys that an SM goes through until the last such four end."""
    union_waves: float
    """Whole waves of fours: their keys are sorted out by one program on an SM."""
    lone_keys: float
    """Keys of the longest row where rows are left over behind the fours: these run after them."""
    query_tiles: float
    """Tiles of 128 queries."""
    tile_pairs: float
    """(query, key) pairs of these tiles."""
    tile_makespan_pairs: float
    """Of these, pairs that an SM goes through until the last tile ends; of 256 channels in whole
    blocks of keys."""
    tile_waves: float
    """Whole waves of these tiles, one for each head."""
    fa2_tiles: float
    """Tiles of FlashAttention-2, which are narrower for few new tokens a sequence."""
    fa2_narrow: float
    """1 where these have 16 queries of 256 channels: warps share the keys then, and merge."""
    fa2_tile_waves: float
    """Whole waves of these, two on each SM; of 256 channels they take as long as one by one."""
    fa2_makespan_pairs: float
    """Pairs of its busiest SM."""
    fa2_splits: float
    """1 where it splits keys, so that partial outputs are merged, else 0."""
    fa2_split_rows: float
    """Rows whose partial outputs are merged: many, of few heads."""


class FlashMlaTerms(NamedTuple):
    """What FlashMLA's decode kernel makes of the rows of a packed pool."""

    max_split_blocks: float
    """Blocks of the fullest part of its schedule."""
    mixed_max_split_blocks: float
    """The same with all queries in one row."""


# What a sequence costs is in its tiles: of equal ones, as most are, nothing tells the two apart.
OF_FA3 = ("gemm_keys", "query_tiles", "tile_waves", "tile_makespan_pairs")
OF_FA2 = (
    "gemm_keys", "fa2_tiles", "fa2_narrow", "fa2_tile_waves", "fa2_makespan_pairs", "fa2_splits",
    "fa2_split_rows",
)  # fmt: skip
OF_SDPA = ("gemm_keys", "query_tiles", "tile_pairs")
OF_MLA = ("rows", "gemm_rows", "prefix_keys", "makespan_keys", "attended_pairs")
# A program alone on an SM waits for memory, so that its keys take longer than those of two.
OF_TRITON = (*OF_MLA, "longest_keys")
OF_UNION = (
    "prefix_keys", "union_makespan_keys", "longest_union", "union_waves", "lone_keys", "lone_rows",
)  # fmt: skip
# Sequences cost the kernel nothing, but SGLang's host (engines/sglang/costs.py).
OF_FLASHMLA_SPARSE = ("rows", "gemm_rows", "sequences", "prefix_keys", "makespan_keys")
# What rows cost is in the schedule: at powers of two, as most swept rows are, both grow alike.
OF_FLASHMLA_KV = ("prefix_keys", "attended_pairs", "max_split_blocks")
OF_FLASHMLA_MIXED = ("prefix_keys", "attended_pairs", "mixed_max_split_blocks")
OF_SPARSE_FA3 = ("rows", "gemm_rows", "prefix_keys", *schedules.Fa3Terms._fields)


def features(setting: Setting) -> FeatureFunctions:
    """The features of a prefill batch, and where it lies: octaves of its q tokens, half octaves of
    the others, along which the kernels' efficiency changes less."""
    topk = setting.profile.index_topk
    names, schedule = _schedule(setting)

    def some(wanted: Collection[str]) -> Callable[[Batch], tuple[float, ...]]:
        of_pool = schedule if set(names) & set(wanted) else _zeros(names)
        return terms_of(setting, wanted, of_pool)

    def coordinates(batch: Batch) -> tuple[float, ...]:
        attended = schedules.attended_pairs(batch, topk)
        return (
            log2(batch.q_tokens),
            log2(batch.kv_tokens) / 2,
            log2(attended / batch.q_tokens) / 2,
            log2(batch.batch_size) / 2,
        )

    every = (*Terms._fields, *names)
    return FeatureFunctions(every, some(every), coordinates, _regime, some)


def _regime(batch: Batch) -> int:
    """Without any prefix nothing is read back: that is a regime of its own."""
    return 1 if batch.prefix_tokens else 0


_Some = Callable[[Batch, float], tuple[float, ...]]
"""Some of the terms of a batch and its attended pairs."""


def _schedule(setting: Setting) -> tuple[tuple[str, ...], _Some]:
    """Names and terms of what dense attention has not: whether rows are left over behind the fours,
    for which a union launches a kernel more, and what the kernels over this layout of a pool do."""
    if setting.layout is KVLayout.BF16:
        fa3 = schedules.fa3(setting)
        names = ("lone_rows", *schedules.Fa3Terms._fields)
        return names, lambda batch, attended: (batch.q_tokens % 4 > 0, *fa3(batch, attended))
    blocks, mixed = schedules.flash_mla_blocks(setting), schedules.mixed_blocks(setting)
    return ("lone_rows", *FlashMlaTerms._fields), lambda batch, attended: (
        batch.q_tokens % 4 > 0, blocks(batch.q_tokens), mixed(batch.q_tokens),
    )  # fmt: skip


def terms_of(
    setting: Setting, wanted: Collection[str] = Terms._fields, of_pool: _Some | None = None
) -> Callable[[Batch], tuple[float, ...]]:
    """The numbers called `Terms` of a batch, and those of its pool; those of unions, and of tiles,
    may be 0 where none of them is wanted."""
    topk, wave = setting.profile.index_topk, schedules.wave_of(setting)
    first = Terms._fields.index("longest_union"), Terms._fields.index("query_tiles")
    unions, tiles = Terms._fields[slice(*first)], Terms._fields[first[1] :]
    of_unions = _zeros(unions) if set(unions).isdisjoint(wanted) else _unions(setting)
    of_tiles = _zeros(tiles) if set(tiles).isdisjoint(wanted) else _tiles(setting)
    of_pool = of_pool or _zeros(())

    def terms(batch: Batch) -> tuple[float, ...]:
        rows, keys = batch.q_tokens, batch.kv_tokens
        attended = schedules.attended_pairs(batch, topk)
        pairs, longest = schedules.step_pairs(batch, topk, attended)
        return (
            rows,
            max(rows, _TILE),
            max(keys, _TILE),
            batch.batch_size,
            keys if keys > rows else 0,
            attended,
            schedules.makespan(rows, pairs, longest, wave),
            min(batch.max_kv, topk),
            *of_unions(batch, attended),
            *of_tiles(batch, attended),
            *of_pool(batch, attended),
        )

    return terms


def _zeros(names: Sequence[str]) -> _Some:
    none = (0.0,) * len(names)
    return lambda batch, attended: none


def _unions(setting: Setting) -> _Some:
    topk, sms, kept = setting.profile.index_topk, schedules.sms_of(setting), setting.kept

    def terms(batch: Batch, attended: float) -> tuple[float, ...]:
        del attended
        rows = batch.q_tokens
        union, longest = union_keys(schedules.sequences(batch), topk, kept)
        makespan = schedules.makespan(-(-rows // 4), union, longest, sms)
        waves, lone = -(-(rows // 4) // sms), min(batch.max_kv, topk) if rows % 4 else 0
        return longest, makespan, waves, lone

    return terms


def _tiles(setting: Setting) -> _Some:
    topk, heads, sms = setting.profile.index_topk, setting.heads, schedules.sms_of(setting)
    slots, share, channels = 2 * sms, heads / (2 * sms), setting.profile.v

    def terms(batch: Batch, attended: float) -> tuple[float, ...]:
        del attended
        rows = batch.q_tokens
        tiles, tile_pairs = query_tiles(batch, _TILE)
        width = fa2_tile(batch, channels)
        fa2_tiles, fa2_pairs = (tiles, tile_pairs) if width == _TILE else query_tiles(batch, width)
        blocks, fa2_blocks = tiles * heads, fa2_tiles * heads
        fa3_keys, fa3_pairs, held = batch.max_kv, tile_pairs, slots
        if channels >= 256:
            fa3_keys, held = -(-fa3_keys // _KEYS) * _KEYS, sms
            fa3_pairs += tiles * _TILE * _KEYS / 2
        longest = batch.max_kv
        if longest <= topk and fa2_blocks <= slots:
            longest = fa2_keys(batch, width, slots // heads)
        splits, busiest = longest < batch.max_kv, float(longest * width)
        if fa2_blocks > slots:
            busiest = max(fa2_pairs * share + busiest / 2, busiest)
        return (
            tiles,
            tile_pairs,
            schedules.makespan(blocks, fa3_pairs * heads, fa3_keys * _TILE, sms),
            -(-blocks // sms),
            fa2_tiles,
            width == 16 and channels >= 256,
            -(-fa2_blocks // held),
            busiest,
            splits,
            rows if splits else 0,
        )

    return terms


def union_keys(
    alike: Iterable[tuple[int, int, int]], topk: int, kept: float
) -> tuple[float, float]:
    """Keys that any of four neighbouring rows reads: of all fours, and of the longest. A row keeps
    this share of the selection of the row before it, and chooses the rest at random."""
    total = longest = opened = 0.0
    filled = 0
    for prefix, new, count in alike:
        keys, most = prefix + new / 2, new
        drawn = min(topk / keys, 1.0)
        # What the first row leaves unread, and which part of it each further row.
        unread, left = 1.0 - drawn, 1.0 - (1.0 - kept) * drawn
        if count > 1 and new % 4:
            # Fours run on from one sequence into the next: most hold two halves.
            fours = (new + 3) / 4
            total += count * fours * keys * (1.0 - unread * left ** (new / fours - 1.0))
            reached = 2 * keys * (1.0 - unread * left) if new > 1 else min(count, 4) * keys * drawn
            longest = max(longest, reached)
            continue
        if filled:
            head = min(4 - filled, new)
            opened += keys * (1.0 - unread * left ** (head - 1))
            filled += head
            most -= head
            if filled < 4:
                continue
            total += opened
            longest = max(longest, opened)
        fours, filled = divmod(most, 4)
        if fours:
            four = keys * (1.0 - unread * left * left * left)
            total += count * fours * four
            longest = max(longest, four)
        # Rows behind the last four are no union.
        opened = keys * (1.0 - unread * left ** (filled - 1)) if filled else 0.0
    return total, longest


def fa2_tile(batch: Batch, channels: int) -> int:
    """Queries of FlashAttention-2's tile, by mean new tokens a sequence: 16, from 17 on 64, from 65
    on 128 if values have fewer than 256 channels (FlashInfer, utils.cuh, FA2DetermineCtaTileQ)."""
    rows, count = batch.q_tokens, batch.batch_size
    return 128 if channels < 256 and rows >= 65 * count else 64 if rows >= 17 * count else 16


def fa2_keys(batch: Batch, width: int, most: int) -> int:
    """Keys of a piece: it splits the keys, and merges partial outputs, to fill the device with
    `most` pieces, two blocks an SM (FlashInfer scheduler.cuh, PrefillBinarySearchKVChunkSize)."""
    some = schedules.sequences(batch)
    runs = [(prefix + new, -(-new // width) * count) for prefix, new, count in some]
    low, high = min(_FEWEST_KEYS, batch.max_kv), batch.max_kv
    # Pieces are no fewer than all keys fill, and at most one more of each tile.
    work, least = sum([keys * tiles for keys, tiles in runs]), sum([tiles for _, tiles in runs])
    low = max(low, min(-(-work // most), high))
    if most > least:
        high = max(low, min(-(-work // (most - least)), high))
    while low < high:
        middle = (low + high) // 2
        if sum([-(-keys // middle) * tiles for keys, tiles in runs]) > most:
            low = middle + 1
        else:
            high = middle
    return low


def query_tiles(batch: Batch, width: int) -> tuple[int, float]:
    """Tiles of `width` queries of one sequence, and the (query, key) pairs in them; from sums as if
    all sequences were equal."""
    half = width / 2
    if batch.kv_lens is None:
        count = batch.batch_size
        each = -(-batch.q_tokens // (count * width))
        before = half * (each - 1) * count + batch.prefix_tokens
        return count * each, (each * before + batch.q_tokens) * width
    total, keys = 0, 0.0
    for prefix, new, count in schedules.sequences(batch):
        tiles = -(-new // width)
        total += count * tiles
        # Each tile sees the prefix and the tiles before it, and the last one the sequence's end.
        keys += count * (tiles * (prefix + half * (tiles - 1)) + new)
    return total, keys * width
