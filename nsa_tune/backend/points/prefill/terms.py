"""How much work a prefill batch is: the terms that an arm's time is a sum of.

Sums of tokens are not enough. Dense attention computes whole tiles of queries, so that 64
sequences of one new token cost 64 tiles; sparse attention runs one query on one SM (or two), so
that a batch costs whole waves of them. Measured on an H100 (docs/policy.md), each of the two
terms halves the worst error of a model without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from math import log2
from operator import sub

from nsa_tune.backend.points import guards
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

__all__ = [
    "COORDINATES",
    "OF_FA2",
    "OF_FA3",
    "OF_FLASHMLA_KV",
    "OF_MLA",
    "OF_SDPA",
    "TERMS",
    "attended_of",
    "cost_terms",
    "locate",
    "pairs_in_waves",
    "runs",
    "term_bounds",
    "wave_of",
]

_TILE = 128
"""Queries that FlashAttention-3 computes at once for head dims of 192 and 128."""
_NARROWEST = 16
_FEWEST_KEYS = 128

TERMS = (
    "sequences",
    "q_tokens",
    "kv_tokens",
    "tokens_read_back",
    "attended_pairs",
    "attended_pairs_in_whole_waves",
    "query_tiles",
    "pairs_in_whole_tiles",
    "queries_merged",
    "narrow_tiles",
    "pairs_in_narrow_tiles",
    "kv_tokens_in_a_tile",
    "q_tokens_in_a_tile",
    "pairs_of_the_busiest",
    "narrow_pairs_of_the_busiest",
)
_OF_SUMS = ("sequences", "q_tokens")
_OF_ALL = ("kv_tokens", "tokens_read_back")
_OF_MHA = (*_OF_ALL, "kv_tokens_in_a_tile")
# What a sequence and its queries cost is in their tiles. Where all sequences are equal nothing
# tells the two apart, and half of it would be charged to ragged ones again.
OF_FA3 = (*_OF_MHA, "query_tiles", "pairs_in_whole_tiles", "pairs_of_the_busiest")
OF_FA2 = (
    *_OF_MHA,
    "narrow_tiles",
    "pairs_in_narrow_tiles",
    "queries_merged",
    "narrow_pairs_of_the_busiest",
)
OF_SDPA = (*_OF_SUMS, *_OF_MHA, "attended_pairs", "query_tiles", "pairs_in_whole_tiles")
OF_FLASHMLA_KV = (
    *_OF_SUMS,
    *_OF_ALL,
    "attended_pairs",
    "attended_pairs_in_whole_waves",
)
OF_MLA = (*OF_FLASHMLA_KV, "q_tokens_in_a_tile")
COORDINATES = ("q_tokens", "kv_tokens", "attended_per_query", "sequences")


def attended_of(batch: Batch, topk: int) -> int:
    """Pairs that sparse attention computes: a query attends to at most `topk` keys.

    From sums alone it is an upper bound, reached while all queries are below or all above.
    """
    if batch.max_kv <= topk:
        return batch.pairs
    if batch.kv_lens is None:
        return min(batch.pairs, batch.q_tokens * topk)
    total = 0
    for prefix, new, count in runs(batch):
        below = min(max(topk - prefix, 0), new)
        total += count * (below * prefix + below * (below + 1) // 2 + (new - below) * topk)
    return total


def runs(batch: Batch) -> Iterable[tuple[int, int, int]]:
    """(prefix, new, count) of sequences that are alike: all of them, or each by itself."""
    kv_lens, new_lens = batch.kv_lens, batch.new_lens
    assert kv_lens is not None
    assert new_lens is not None
    count, kv, new = len(kv_lens), kv_lens[0], new_lens[0]
    if kv_lens.count(kv) == count == new_lens.count(new):
        return ((kv - new, new, count),)
    return zip(map(sub, kv_lens, new_lens), new_lens, repeat(1), strict=False)


def _tiles(batch: Batch, tile: int) -> tuple[float, float]:
    """(tiles of `tile` queries, pairs in them); from sums alone as if all sequences were equal."""
    if batch.kv_lens is None:
        count = batch.sequences
        tiles = -(-batch.q_tokens // (count * tile))
        before = 0.5 * tile * (tiles - 1) * count + batch.prefix_tokens
        return count * tiles, (tiles * before + batch.q_tokens) * tile
    total, pairs = 0, 0
    for prefix, new, count in runs(batch):
        tiles = -(-new // tile)
        total += count * tiles
        # Each tile sees the prefix and the tiles before it, and the last one the sequence's end.
        pairs += count * tile * (tiles * prefix + tile * tiles * (tiles - 1) // 2 + new)
    return total, pairs


def _narrow_tile(batch: Batch) -> int:
    """Queries that FlashAttention-2 computes at once, by the mean of new tokens a sequence, a
    whole number: 16, from 17 on 64, from 65 on 128 (FlashInfer, utils.cuh, FA2DetermineCtaTileQ).

    Without a branch, which every plan would take, also where no dense arm may run.
    """
    some = batch.q_tokens >= 17 * batch.sequences
    many = batch.q_tokens >= 65 * batch.sequences
    return _NARROWEST + 48 * some + 64 * many


def wave_of(setting: Setting) -> int:
    """Queries that the device computes at once: one SM does 64 heads of a query."""
    heads = guards.padded_heads(setting.heads) or 128
    return max(setting.device.sms // (heads // 64), 1)


def pairs_in_waves(attended: float, queries: int, longest: float, wave: int) -> float:
    """`attended` pairs where `wave` queries run at once and the last of them, with up to `longest`
    keys, are waited for: queries follow one another on an SM."""
    waves = (queries + (wave - 1)) // wave
    return (attended / queries * (waves - 1) + longest) * wave


def cost_terms(batch: Batch, setting: Setting) -> tuple[float, ...]:
    """Amounts of work, in the order of `TERMS`."""
    attended = attended_of(batch, setting.profile.index_topk)
    wave = wave_of(setting)
    tiles, pairs = _tiles(batch, _TILE)
    narrow = _narrow_tile(batch)
    # From lengths counting takes a pass over them; from sums a question would be a branch.
    alike = batch.kv_lens is not None and narrow == _TILE
    narrow_tiles, narrow_pairs = (tiles, pairs) if alike else _tiles(batch, narrow)
    # A tile's keys are one SM's work, unless they are split among all.
    share = setting.heads / max(setting.device.sms, 1)
    evenly, narrow_evenly = pairs * share, narrow_pairs * share
    splits = _splits_keys(narrow_tiles, batch, setting)
    return (
        batch.sequences,
        batch.q_tokens,
        batch.kv_tokens,
        batch.kv_tokens if batch.prefix_tokens else 0,
        attended,
        attended / batch.q_tokens * wave * ((batch.q_tokens + (wave - 1)) // wave),
        tiles,
        pairs,
        batch.q_tokens if splits else 0,
        narrow_tiles,
        narrow_pairs,
        _larger(batch.kv_tokens, _TILE),
        _larger(batch.q_tokens, _TILE),
        _larger(evenly, batch.max_kv * _TILE),
        narrow_evenly if splits else _larger(narrow_evenly, batch.max_kv * narrow),
    )


def _larger(one: float, other: float) -> float:
    """The larger one, without a branch."""
    return one + (other - one) * (one < other)


def term_bounds(batch: Batch, setting: Setting) -> tuple[tuple[float, float] | None, ...]:
    """The least and the most of those of `TERMS` that are dear to compute from a batch's sums.

    A sequence of the mean `new` tokens has at most new / 128 + 1 tiles. With their 128 queries each
    sees prefix + 64 * (tiles + 1) keys, which over all sequences comes to at most
    (q_tokens + 128) * (prefix_tokens + q_tokens / 2) + 128 * q_tokens + 2**14 * sequences.
    Narrow tiles have no more pairs.
    """
    topk, wave = setting.profile.index_topk, wave_of(setting)
    attended = attended_of(batch, topk)
    tiles, share = batch.q_tokens / _TILE, setting.heads / max(setting.device.sms, 1)
    most = (batch.q_tokens + _TILE) * (batch.kv_tokens + (_TILE + _TILE * _TILE))
    return (
        None,
        None,
        None,
        None,
        None,
        (attended, attended + topk * (wave - 1)),
        (tiles, tiles + batch.sequences),
        (_TILE * batch.prefix_tokens, most),
        (0, batch.q_tokens),
        (tiles, batch.q_tokens / _NARROWEST + batch.sequences),
        (_NARROWEST * batch.prefix_tokens, most),
        (batch.kv_tokens, batch.kv_tokens + _TILE),
        (batch.q_tokens, batch.q_tokens + _TILE),
        (share * _TILE * batch.prefix_tokens, share * most + _TILE * batch.max_kv),
        (share * _NARROWEST * batch.prefix_tokens, share * most + _TILE * batch.max_kv),
    )


def _splits_keys(tiles: float, batch: Batch, setting: Setting) -> bool:
    """Whether FlashAttention-2 splits the keys, and merges partial outputs, to fill the device.

    FlashInfer runs two blocks an SM and splits into 128 keys at least (scheduler.cuh,
    PrefillSplitQOKVIndptr). Beyond index_topk no dense arm runs.
    """
    if batch.max_kv > setting.profile.index_topk or batch.max_kv <= _FEWEST_KEYS:
        return False
    return tiles * setting.heads <= setting.device.sms


def locate(batch: Batch, setting: Setting) -> tuple[float, ...]:
    """Where the batch lies, in the order of `COORDINATES`: octaves of q tokens, half octaves of
    the others, along which the kernels' efficiency changes less."""
    attended = attended_of(batch, setting.profile.index_topk)
    return (
        log2(batch.q_tokens),
        log2(batch.kv_tokens) / 2,
        log2(attended / batch.q_tokens) / 2,
        log2(batch.sequences) / 2,
    )
