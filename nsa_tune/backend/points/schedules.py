"""How kernels spread a batch's rows over the SMs: tiles, whole waves, split-KV and the makespan.

A row is a query token. Each function follows the arithmetic of a kernel's own scheduler as far as
batches tell it apart (docs/policy.md says what each term saves).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from heapq import heappop, heappush, heapreplace
from math import ceil, inf
from typing import NamedTuple

from nsa_tune.backend.libraries.flash_mla.limits import padded_heads, split_parts
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

BLOCK = 64
"""Keys of a block: of FlashMLA's and of FlashAttention-3's tile for values of 512 channels."""
STEP = 128
"""Keys of a row that FlashMLA's sparse prefill kernel computes at a time."""
FIXED_BLOCKS = 5
"""Blocks' worth of time that FlashMLA's schedule counts for beginning a row."""
_TILE_HEADS = 64
_FEW_ROWS = 16
"""Queries of a sequence that mostly end in the same step."""
_PROGRAMS_PER_SM = 2
"""The Triton kernels split selections up to so many programs on each SM."""
_ROOMY = 160 * 1024
"""Bytes of shared memory from which `sparse_mla` takes more heads into a program."""

LIST_TAIL, LONGEST_FIRST_TAIL = 0.5, 0.25
"""Part of the longest row that is left when the even share of all is done: of rows in their order,
and of rows that are sorted, the longest first."""
_WAVES = 3
"""Pieces a slot up to which each is dealt by itself."""


def sms_of(setting: Setting) -> int:
    """SMs of the device; 1 for a CPU."""
    return max(setting.device.sms, 1)


def wave_of(setting: Setting) -> int:
    """Queries that the device computes at once: one SM does 64 heads of a query."""
    heads = padded_heads(setting.heads) or 128
    return max(setting.device.sms // (heads // _TILE_HEADS), 1)


def makespan(
    rows: float, work: float, longest: float, slots: int, tail: float = LIST_TAIL
) -> float:
    """When the last of `rows` ends, if each of `slots` begins the next row as soon as it is free.

    `work` is that of all rows, `longest` that of the longest one. Under list scheduling every row
    has begun when the even share is done; then `tail` of the longest is left on average. The most
    are whole waves of the longest row.
    """
    if rows <= slots:
        return longest
    return min(-(-rows // slots) * longest, work / slots + tail * longest)


def dealt(pieces: Sequence[tuple[float, int]], slots: int) -> float:
    """When the last slot is done, if pieces (length, how many) are dealt in this order, each to the
    slot that has the least; of very many, some at once to slots that have about the least."""
    if (total := sum([count for _, count in pieces])) <= slots:
        return max([length for length, count in pieces if count], default=0.0)
    together = total // (_WAVES * slots)
    if together < 2 and total < 2 * len(pieces):
        ends = [0.0] * slots
        for length, count in pieces:
            for _ in range(count):
                heapreplace(ends, ends[0] + length)
        return max(ends)
    levels = [(0.0, slots)]
    for length, count in pieces:
        left = count
        while left:
            level, free = heappop(levels)
            while levels and free < min(together, left) and levels[0][0] < level + length:
                other, more = heappop(levels)
                level = (level * free + other * more) / (free + more)
                free += more
            taken = min(free, left)
            heappush(levels, (level + length, taken))
            if taken < free:
                heappush(levels, (level, free - taken))
            left -= taken
    return max(levels)[0]


# --- pairs of queries and keys


def sequences(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """(prefix, new, count) of sequences that are alike: all of them, or each by itself. From sums
    alone they count as equal, as far as whole tokens allow."""
    kv_lens, new_lens = batch.kv_lens, batch.new_lens
    if kv_lens is None or new_lens is None:
        count, prefix = batch.batch_size, batch.prefix_tokens // batch.batch_size
        new, more = divmod(batch.q_tokens, count)
        yield prefix, new, count - more
        if more:
            yield prefix, new + 1, more
        return
    count, kv, new = len(kv_lens), kv_lens[0], new_lens[0]
    if kv_lens.count(kv) == count == new_lens.count(new):
        yield kv - new, new, count
        return
    for kv, new in zip(kv_lens, new_lens, strict=True):
        yield kv - new, new, 1


def attended_pairs(batch: Batch, topk: int) -> float:
    """Pairs that sparse attention computes: a query attends to at most `topk` keys.

    From sums alone it is an upper bound, reached while all queries are below or all above.
    """
    if batch.max_kv <= topk:
        return float(batch.pairs)
    if batch.kv_lens is None:
        return float(min(batch.pairs, batch.q_tokens * topk))
    total = 0
    for prefix, new, count in sequences(batch):
        if prefix >= topk:
            total += count * new * topk
            continue
        # Queries that see no more than `topk` keys.
        below = new if prefix + new <= topk else topk - prefix
        total += count * (below * prefix + below * (below + 1) // 2 + (new - below) * topk)
    return float(total)


def step_pairs(batch: Batch, topk: int, attended: float) -> tuple[float, int]:
    """The attended pairs, and the longest row, if keys are rounded up to whole steps of FlashMLA.

    Rows that are alike are rounded up together. Of others each takes half a step more, except rows
    of `topk` keys, which are whole steps; how many have fewer is estimated as if each of them had
    half as many.
    """
    rows = batch.q_tokens
    longest = -(-min(batch.max_kv, topk) // STEP) * STEP
    if batch.max_kv <= STEP:
        return rows * longest, longest
    if rows <= _FEW_ROWS * batch.batch_size and batch.kv_tokens == batch.batch_size * batch.max_kv:
        return rows * -(-attended / rows // STEP) * STEP, longest
    more = min((rows * topk - attended) * STEP / topk, rows * STEP / 2)
    return min(attended + more, rows * longest), longest


# --- FlashMLA's decode kernel


def row_blocks(setting: Setting) -> int:
    """Blocks' worth of time that FlashMLA takes for a row's whole selection, of however few
    keys."""
    return -(-setting.profile.index_topk // BLOCK) + FIXED_BLOCKS


def max_split_blocks(rows: int, blocks: int, parts: int) -> float:
    """Blocks of the fullest of `parts` into which FlashMLA's schedule deals `rows` of `blocks`.

    Equal parts of all blocks, or whole rows: a part ends early rather than begin a row that it has
    no time for (`get_mla_metadata`).
    """
    even = -(-rows * blocks // parts) + FIXED_BLOCKS
    return float(min(-(-rows // parts) * blocks, even))


def flash_mla_blocks(setting: Setting) -> Callable[[int], float]:
    """`max_split_blocks` of so many rows."""
    blocks, parts = row_blocks(setting), split_parts(setting)
    return lambda rows: max_split_blocks(rows, blocks, parts)


def grouped_blocks(setting: Setting) -> Callable[[Batch], float]:
    """The same with a sequence's queries in one row. A part then takes as many times more SMs as
    there are queries, so there are fewer parts."""
    blocks, parts = row_blocks(setting), split_parts(setting)

    def fullest(batch: Batch) -> float:
        groups = max(parts * batch.batch_size // batch.q_tokens, 1)
        return max_split_blocks(batch.batch_size, blocks, groups)

    return fullest


def mixed_blocks(setting: Setting) -> Callable[[int], float]:
    """The same with all queries in one row, which makes each query parts of its own: as many as fit
    on the device at once, else one."""
    blocks, parts = row_blocks(setting), split_parts(setting)

    def fullest(rows: int) -> float:
        each = parts // rows
        if each > 1:
            return float(-(-blocks // each) + FIXED_BLOCKS)
        return float(-(-rows // parts) * blocks)

    return fullest


# --- FlashAttention-3 over selected tokens


class Fa3Terms(NamedTuple):
    """What FlashAttention-3 makes of rows of selected tokens (`flash_attn_with_kvcache`)."""

    fa3_makespan_blocks: float
    """Blocks of keys that the busiest SM goes through."""
    fa3_merged_parts: float
    """Parts of rows that are split."""
    fa3_merges: float
    """1 where any row is split, else 0."""


_FULL = 0.8
"""Tiles full of heads, an SM, from which FlashAttention-3 splits none."""
_DEALT = 2
"""Rows an SM that are few."""
_NEARLY = 0.85
"""Share of the best filling of waves from which FlashAttention-3 takes fewer parts."""


def fa3(setting: Setting) -> Callable[[Batch, float], Fa3Terms]:
    """A function of a batch and its attended pairs.

    A device's share of all blocks, and a tenth more, is the most that one tile gets; longer rows
    are split (`prepare_varlen_num_blocks_kernel`), into no more parts than fill whole waves well.
    Of few rows each is dealt by itself: how long the last ones are decides. Many are not split.
    """
    sms, topk = sms_of(setting), setting.profile.index_topk
    tiles = -(-setting.heads // _TILE_HEADS)
    all_parts = min(sms, -(-topk // BLOCK))

    def terms(batch: Batch, attended: float) -> Fa3Terms:
        rows, longest = batch.q_tokens, min(batch.max_kv, topk)
        if rows > _DEALT * sms:
            key_blocks = -(-longest // BLOCK)
            # So many rows like the longest would be as much work.
            work = attended / longest * tiles * key_blocks
            tail = LONGEST_FIRST_TAIL if attended < rows * longest else inf
            busiest = makespan(rows * tiles, work, key_blocks, sms, tail)
            return Fa3Terms(max(busiest, float(key_blocks)), 0.0, 0.0)
        # By its times sglang-kernel counts a tile that is not full of heads as a part of one.
        full, blocks = rows * setting.heads / _TILE_HEADS, _row_blocks(batch, topk)
        most = 1 if full >= _FULL * sms else filling_parts(ceil(full), sms, all_parts)
        share = -(-sum([each * count for each, count in blocks.items()]) * 11 * tiles // (10 * sms))
        parts = {each: min(-(-each // share), most) for each in blocks}
        pieces = [(-(-each // n), blocks[each] * n * tiles) for each, n in parts.items()]
        merged = sum([blocks[each] * n for each, n in parts.items() if n > 1])
        busiest = dealt(sorted(pieces, reverse=True), sms)
        return Fa3Terms(float(busiest), float(merged), float(merged > 0))

    return terms


def _row_blocks(batch: Batch, topk: int) -> dict[int, int]:
    """How many rows have so many blocks of selected keys."""
    found: dict[int, int] = {}
    for prefix, new, count in sequences(batch):
        row, end = prefix, prefix + new
        while row < end:
            blocks = min(row, topk - 1) // BLOCK + 1
            last = end if blocks * BLOCK >= topk else min(blocks * BLOCK, end)
            found[blocks] = found.get(blocks, 0) + (last - row) * count
            row = last
    return found


@cache
def filling_parts(tiles: int, sms: int, most: int) -> int:
    """The smallest number of parts, up to `most`, of which waves are filled nearly best
    (`num_splits_heuristic`; upstream counts one row's tiles only, sglang-kernel those of all)."""
    filled = [tiles * parts / sms / -(-tiles * parts // sms) for parts in range(1, most + 1)]
    enough = _NEARLY * max(filled)
    return 1 + next(i for i, share in enumerate(filled) if share >= enough)


# --- Triton's programs


def triton_keys_per_sm(setting: Setting) -> Callable[[int], float]:
    """`kernels/sparse_mla.py`: keys that an SM goes through for so many rows. A program takes 16,
    32 or 64 heads of a row, and a power of two of programs share its selection."""
    heads, roomy = setting.heads, setting.device.shared_memory_optin >= _ROOMY
    block = 64 if heads > 32 and roomy else 32 if heads > 16 and roomy else 16
    most = max(setting.profile.index_topk // 128, 1)
    return _keys_per_sm(setting, block, {most: setting.device.sms * _PROGRAMS_PER_SM})


def split_triton_keys_per_sm(setting: Setting) -> Callable[[int], float]:
    """`kernels/split_sparse_mla.py`: likewise, with 16 heads a program and more parts."""
    most = -(-setting.profile.index_topk // 32)
    slots = setting.device.sms * _PROGRAMS_PER_SM
    return _keys_per_sm(setting, 16, {min(most, 64): 2, min(most, 32): slots})


def _keys_per_sm(setting: Setting, block: int, limits: Mapping[int, int]) -> Callable[[int], float]:
    """`block` heads a program; `limits`: the most parts of a row, and up to how many programs
    before splitting. A row has the most parts, a power of two, that leave each program a slot."""
    sms, blocks, topk = sms_of(setting), -(-setting.heads // block), setting.profile.index_topk
    most_rows = [
        (1 << power, min(_PROGRAMS_PER_SM * sms >> power, unsplit) // blocks)
        for most, unsplit in limits.items()
        for power in range(most.bit_length() - 1, 0, -1)
    ]

    def keys(rows: int) -> float:
        parts = next((parts for parts, most in most_rows if rows <= most), 1)
        return -(-rows * parts * blocks // sms) * topk / parts

    return keys
