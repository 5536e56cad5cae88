"""How much work a prefill batch is: the features that an arm's time is a weighted sum of.

Sums of tokens are not enough. Dense attention computes whole tiles of queries: 64 sequences of one
new token cost 64 tiles. Sparse attention runs one query on one SM (or two): a batch costs whole
waves of queries (docs/policy.md).
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

from nsa_tune.backend.libraries.flash_mla.limits import padded_heads
from nsa_tune.backend.points import splits
from nsa_tune.backend.points.sequences import runs
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.formula import Formulas, Value, larger
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting

_REGIMES = frozenset({0, 1})
"""Without any prefix nothing is read back: that is a regime of its own."""
_TILE = 128
"""Queries that FlashAttention-3 computes at once for head dims of 192 and 128."""
_FEWEST_KEYS = 128
"""Keys of the smallest part into which FlashAttention-2 splits them."""

_FEATURES = (
    "batch_size",
    "rows",
    "keys",
    "tokens_read_back",
    "attended_pairs",
    "attended_pairs_in_whole_waves",
    "pairs_in_steps",
    "steps_in_turn",
    "query_tiles",
    "pairs_in_whole_tiles",
    "queries_merged",
    "merges_queries",
    "narrow_tiles",
    "pairs_in_narrow_tiles",
    "kv_tokens_in_a_tile",
    "q_tokens_in_a_tile",
    "pairs_of_the_busiest",
    "narrow_pairs_of_the_busiest",
    "narrow_turns",
    "query_turns",
)
_OF_ROWS = ("batch_size", "rows")
_OF_KEYS = ("keys", "tokens_read_back")
_OF_MHA = (*_OF_KEYS, "kv_tokens_in_a_tile")
# What a sequence and its queries cost is in their tiles. Where sequences are equal, as in most
# swept batches, nothing tells the two apart, and half of it would be charged to ragged ones again.
OF_FA3 = (*_OF_MHA, "query_tiles", "pairs_in_whole_tiles", "pairs_of_the_busiest", "query_turns")
OF_FA3_MERGED = ("rows", *OF_FA3)
OF_FA2 = (
    *_OF_MHA,
    "narrow_tiles",
    "pairs_in_narrow_tiles",
    "queries_merged",
    "merges_queries",
    "narrow_pairs_of_the_busiest",
    "narrow_turns",
)
OF_SDPA = (*_OF_ROWS, *_OF_MHA, "attended_pairs", "query_tiles", "pairs_in_whole_tiles")
_OF_POOL_READERS = ("tokens_read_back", "attended_pairs", "missed_pairs")
# What rows cost is in the steps: at powers of two, as most swept rows are, both grow alike. Keys
# are not offered either: without a prefix there are as many as rows.
OF_FLASHMLA_KV = (*_OF_POOL_READERS, *splits.OF_FLASHMLA_KV)
OF_FLASHMLA_MIXED = (*_OF_POOL_READERS, *splits.OF_FLASHMLA_MIXED)
OF_MLA = (
    *_OF_ROWS,
    *_OF_KEYS,
    "attended_pairs",
    "attended_pairs_in_whole_waves",
    "q_tokens_in_a_tile",
)
OF_FLASHMLA_SPARSE = (
    *_OF_ROWS,
    *_OF_KEYS,
    "pairs_in_steps",
    "steps_in_turn",
    "q_tokens_in_a_tile",
)
OF_SPARSE_FA3 = ("rows", "q_tokens_in_a_tile", *splits.OF_FA3)


def formulas(setting: Setting) -> Formulas:
    """The features of a prefill batch, and where it lies: octaves of its q tokens, half octaves of
    the others, along which the kernels' efficiency changes less."""
    topk, wave = setting.profile.index_topk, wave_of(setting)
    # A tile's keys are one SM's work, unless they are split among all.
    heads, sms = setting.heads, max(setting.device.sms, 1)
    share = heads / sms
    whole = f"(query_tiles, pairs_in_whole_tiles) if narrow == {_TILE} else "
    values = {
        **attended_pairs(topk),
        **splits.long_rows(topk),
        **splits.waves("query_waves", "long_rows", float(wave)),
        "attended_pairs_in_whole_waves": splits.in_turn(
            f"query_waves * longest * {wave}.0", topk, wave
        ),
        **_steps(topk, wave),
        "tokens_read_back": Value("keys if prefix_tokens else 0.0"),
        "kv_tokens_in_a_tile": Value(larger("keys", f"{_TILE}.0")),
        "q_tokens_in_a_tile": Value(larger("rows", f"{_TILE}.0")),
        **_tiles("query_tiles", "pairs_in_whole_tiles", str(_TILE)),
        **_dealt_out(setting),
        # FlashAttention-2's tile, by the mean of new tokens a sequence, a whole number: 16, from
        # 17 on 64, from 65 on 128 (FlashInfer, utils.cuh, FA2DetermineCtaTileQ).
        "narrow": Value(
            "128 if q_tokens >= 65 * batch_size else 64 if q_tokens >= 17 * batch_size else 16"
        ),
        **_tiles("narrow_tiles", "pairs_in_narrow_tiles", "narrow", whole),
        # It splits the keys, and merges partial outputs, to fill the device: two blocks an SM
        # (FlashInfer scheduler.cuh, PrefillSplitQOKVIndptr).
        "splits": Value(f"{_FEWEST_KEYS} < max_kv <= {topk} and narrow_tiles * {heads} <= {sms}"),
        "queries_merged": Value("rows if splits else 0.0"),
        "merges_queries": Value("1.0 if splits else 0.0"),
        # Each tile begins and ends, however few keys it has.
        "query_turns": Value(f"-(-query_tiles * {heads} // {sms}) * 1.0"),
        "narrow_turns": Value(f"-(-narrow_tiles * {heads} // {2 * sms}) * 1.0"),
        # Tiles are begun in their order, two at a time on an SM. If they do not all fit at once, a
        # long one may be the last to begin.
        "narrow_share": Value(f"pairs_in_narrow_tiles * {share / 2!r}"),
        "narrow_longest": Value("1.0 * max_kv * narrow"),
        "narrow_late": Value("narrow_share + 0.5 * narrow_longest"),
        "narrow_pairs_of_the_busiest": Value(
            f"narrow_share if splits else narrow_longest "
            f"if narrow_tiles * {heads} <= {2 * sms} "
            f"else {larger('narrow_late', 'narrow_longest')}"
        ),
    }
    if setting.layout is KVLayout.BF16:
        steps, of_steps = splits.fa3(setting), splits.OF_FA3
    else:
        steps = {
            "missed_pairs": splits.missed_pairs(setting),
            **splits.flashmla_kv(setting),
            **splits.flashmla_mixed(setting),
        }
        of_steps = ("missed_pairs", *splits.OF_FLASHMLA_KV, *splits.OF_FLASHMLA_MIXED)
    values |= steps
    features = (*_FEATURES, *of_steps)
    coordinates = {
        "q_tokens": "log2(q_tokens)",
        "kv_tokens": "log2(kv_tokens) / 2",
        "attended_per_query": "log2(attended_pairs / q_tokens) / 2",
        "batch_size": "log2(batch_size) / 2",
    }
    functions: dict[str, Callable[..., Any]] = {
        "attended_by_length": attended_by_length,
        "keys_until_the_end": splits.keys_until_the_end,
        "log2": log2,
        "tiles_by_length": _tiles_by_length,
        **(splits.fa3_functions(setting) if setting.layout is KVLayout.BF16 else {}),
    }
    return Formulas(values, features, coordinates, "1 if prefix_tokens else 0", functions, _REGIMES)


def wave_of(setting: Setting) -> int:
    """Queries that the device computes at once: one SM does 64 heads of a query."""
    heads = padded_heads(setting.heads) or 128
    return max(setting.device.sms // (heads // 64), 1)


def pairs_in_waves(attended: str, longest: str, wave: int) -> dict[str, Value]:
    """`waves` of `wave` queries that run at once, and `attended` pairs where the last query of all,
    with up to `longest` keys, is waited for: queries follow one another on an SM."""
    return {
        "waves": Value(f"1.0 * ((q_tokens + {wave - 1}) // {wave})"),
        "attended_pairs_in_waves_to_the_longest": Value(
            f"({attended} / rows * (waves - 1.0) + {longest}) * {wave}.0"
        ),
    }


def attended_pairs(topk: int) -> dict[str, Value]:
    """Pairs that sparse attention computes: a query attends to at most `topk` keys.

    From sums alone it is an upper bound, reached while all queries are below or all above.
    """
    return {
        "all_pairs": Value("1.0 * pairs"),
        "all_full": Value(f"rows * {topk}.0"),
        "attended_pairs": Value(
            f"all_pairs if max_kv <= {topk} or all_pairs < all_full else all_full",
            f"all_pairs if max_kv <= {topk} else 1.0 * attended_by_length(batch, {topk})",
        ),
    }


def attended_by_length(batch: Batch, topk: int) -> int:
    """`attended_pairs` of a batch whose lengths are known."""
    total = 0
    for prefix, new, count in runs(batch):
        if prefix >= topk:
            total += count * new * topk
        else:
            below = new if prefix + new <= topk else topk - prefix
            total += count * (below * prefix + below * (below + 1) // 2 + (new - below) * topk)
    return total


def _steps(topk: int, wave: int) -> dict[str, Value]:
    """Pairs if each row's keys are rounded up to whole steps; all, and in turn."""
    about = f"{wave}.0 * keys_until_the_end(batch, {topk}, {wave}) + more_in_steps"
    return {
        **splits.pairs_in_steps(topk),
        "step_rows": Value("pairs_in_steps / longest_in_steps"),
        "step_evenness": Value("step_rows / rows"),
        **splits.waves("step_waves", "step_rows", float(wave), "step_evenness"),
        **splits.steps_in_turn(f"step_waves * longest_in_steps * {wave}.0", about, wave),
    }


def _tiles(tiles: str, pairs: str, tile: str, known: str = "") -> dict[str, Value]:
    """Tiles of `tile` queries, and the pairs in them; from sums as if all sequences were equal.

    `known` begins a formula that has both already for some batches.
    """
    each = f"{tiles}_each"
    before = f"(0.5 * {tile} * ({each} - 1) * batch_size + prefix_tokens)"
    return {
        each: Value(f"-(-q_tokens // (batch_size * {tile}))"),
        f"{tiles}, {pairs}": Value(
            f"{known}(batch_size * {each}, ({each} * {before} + q_tokens) * {tile})",
            f"{known}tiles_by_length(batch, {tile})",
        ),
    }


def _dealt_out(setting: Setting) -> dict[str, Value]:
    """`pairs_of_the_busiest`: of the SM that FlashAttention-3 takes longest on.

    FlashInfer deals tiles out one head after another, a head's longest first, each to the SM that
    has least (scheduler.cuh, PrefillSM90Plan; with more than 4096 tiles a head it plans one head
    for all). So the last head's longest tile comes late: the SMs have done all heads before it but
    for half of what they are at. An SM gets at most ceil(tiles / SMs) of the longest tile, and just
    that where each sequence is one tile and all have as many keys. FlashInfer measures a tile by
    its keys and twice its queries; here it is its pairs, as what it costs besides is in
    `query_tiles`.
    """
    heads, sms = setting.heads, max(setting.device.sms, 1)
    before = f"pairs_in_whole_tiles * ({(heads - 1) / sms!r} - 0.5 / query_tiles)"
    return {
        "longest_tile": Value(f"max_kv * {_TILE}.0"),
        "whole_turns": Value(f"-(-query_tiles * {heads} // {sms}) * longest_tile"),
        "even_share": Value(f"pairs_in_whole_tiles * {heads / sms!r}"),
        "late_share": Value(f"longest_tile + {before if heads > 1 else '0.0'}"),
        "uneven_share": Value(larger("late_share", "even_share")),
        "pairs_of_the_busiest": Value(
            f"whole_turns if query_tiles * {heads} <= {sms} or whole_turns < uneven_share "
            "or query_tiles == batch_size and kv_tokens == batch_size * max_kv else uneven_share"
        ),
    }


def _tiles_by_length(batch: Batch, tile: int) -> tuple[int, int]:
    total, pairs, half = 0, 0, tile // 2
    for prefix, new, count in runs(batch):
        tiles = (new + tile - 1) // tile
        total += count * tiles
        # Each tile sees the prefix and the tiles before it, and the last one the sequence's end.
        pairs += count * (tiles * (prefix + half * (tiles - 1)) + new)
    return total, tile * pairs
