"""How sparse kernels divide selections among the SMs, as formulas over a batch.

A kernel that splits a row's selection does so to fill the device, in steps: one row more may be one
wave of blocks more. The formulas follow the kernels' own arithmetic (docs/policy.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from heapq import heapify, heappush, heapreplace
from math import ceil
from typing import Any

from nsa_tune.backend.libraries.flash_mla.limits import split_parts
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.formula import Value, larger, smaller
from nsa_tune.backend.types.point import Setting

_TILE_HEADS, _BLOCK_KEYS = 64, 64
"""FlashAttention-3's tile for values of 512 channels (hopper/tile_size.h). FlashMLA's is alike."""
FLASHMLA_STEP = 128
"""Keys of a row that FlashMLA's sparse kernel computes at a time."""
FIXED_BLOCKS = 5
"""Blocks' worth of time that FlashMLA's schedule counts for beginning a row."""
_FEW_ROWS = 16
"""Queries of a sequence that mostly end in the same step."""
_FULL = 0.8
"""Tiles full of heads, an SM, from which FlashAttention-3 splits none."""
_NEARLY = 0.85
"""Share of the best filling of waves from which FlashAttention-3 takes fewer parts."""
_PROGRAMS_AN_SM = 2
"""The Triton kernels split selections up to so many programs on each SM."""
MOST_TURNS = 4
"""Rows a slot up to which they are played through one by one: with more it matters less and takes
longer."""
_ROOMY = 160 * 1024
"""Bytes of shared memory from which `sparse_mla` takes more heads into a program."""

OF_FA3: tuple[str, ...] = (
    "blocks_of_the_busiest", "turns", "parts_merged", "merges", "waves_merged", "distinct_keys",
)  # fmt: skip
OF_FLASHMLA_KV: tuple[str, ...] = ("blocks_of_the_fullest", "splits_rows")
OF_FLASHMLA_GROUPED: tuple[str, ...] = ("grouped_blocks_of_the_fullest", "grouped_splits_rows")
OF_FLASHMLA_MIXED: tuple[str, ...] = ("mixed_blocks_of_the_fullest", "mixed_rows_split")
OF_TRITON = ("keys_of_the_busiest", "programs_merged", "distinct_keys")
OF_TRITON_SPLIT = ("split_keys_of_the_busiest", "split_programs_merged", "distinct_keys")

_UNEQUAL = "attended_pairs < all_full and kv_tokens < batch_size * max_kv"

DISTINCT_KEYS = Value(smaller("keys", "attended_pairs"))
"""Keys that are read from memory: rows that select the same ones find them in the L2."""


def missed_pairs(setting: Setting) -> Value:
    """Attended pairs whose key the L2 has no room for: the same key is read from memory again."""
    profile = setting.profile
    room = setting.device.l2 / setting.layout.token_bytes(profile.rank, profile.rope)
    return Value(f"attended_pairs * (1.0 - {room!r} / keys) if keys > {room!r} else 0.0")


def long_rows(topk: int) -> dict[str, Value]:
    """`longest`: keys of the longest row; `long_rows`: so many rows like it would be as much work;
    `evenness`: these as a part of all rows. `attended_pairs` must be a value before them."""
    return {
        # A float: a product with a whole number takes three times as long.
        "longest": Value(f"({topk}.0 if {topk} < max_kv else 1.0 * max_kv)"),
        "long_rows": Value("attended_pairs / longest"),
        "evenness": Value("long_rows / rows"),
    }


def waves(name: str, count: str, at_once: float, evenness: str = "evenness") -> dict[str, Value]:
    """`name`: how often a slot is taken in turn by `count` pieces of work, of which `at_once` run
    at a time. Equal pieces take whole waves; short ones among others fill the last wave's gaps.
    `evenness` names how equal they are: the mean piece as a part of the longest.

    By sums alone. Where lengths are known, `in_turn` and `fa3_unequal` look at them.
    """
    filled = f"{name}_filled"
    return {
        filled: Value(f"{count} / {at_once!r}"),
        f"{name}_or_less": Value(f"{filled} + -{filled} % 1.0 * {evenness} * {evenness}"),
        name: Value(larger(f"{name}_or_less", "1.0")),
    }


def in_turn(sums: str, topk: int, slots: int) -> Value:
    """Pairs in the time of a kernel that computes a row in each of `slots` at a time, if every slot
    went on until the last row ends. `sums` is their formula by a batch's sums alone.

    Where sequences are unequal, their order tells more. `attended_pairs` and `all_full` must be
    values before it, and `keys_until_the_end` a function.
    """
    keys = f"keys_until_the_end(batch, {topk}, {slots})"
    return Value(sums, f"{slots}.0 * {keys} if q_tokens > {slots} and {_UNEQUAL} else {sums}")


def pairs_in_steps(topk: int) -> dict[str, Value]:
    """`pairs_in_steps`: the attended pairs, if each row's keys are rounded up to whole steps;
    `longest_in_steps`: the longest row's keys likewise.

    Rows that are alike are rounded up together. Of others each takes half a step more, except rows
    of `topk` keys, which are whole steps. How many have fewer is estimated as if each of them had
    half as many. No row is more than the longest, nor, where lengths are known, less than a step.
    The values of `long_rows` must be before these.
    """
    step = FLASHMLA_STEP
    alike = f"q_tokens <= {_FEW_ROWS} * batch_size and kv_tokens == batch_size * max_kv"
    return {
        "mean_keys": Value("attended_pairs / rows"),
        "longest_in_steps": Value(f"-(-longest // {step}) * {step}.0"),
        "more_if_half_full": Value(f"(all_full - attended_pairs) * {step / topk!r}"),
        "more_at_most": Value(f"{step / 2!r} * rows"),
        "more_in_steps": Value(smaller("more_if_half_full", "more_at_most")),
        "unlike_in_steps": Value("attended_pairs + more_in_steps"),
        "most_in_steps": Value("rows * longest_in_steps"),
        "pairs_by_sums": Value(
            f"most_in_steps if max_kv <= {step} "
            f"else rows * -(-mean_keys // {step}) * {step}.0 if {alike} "
            f"else {smaller('unlike_in_steps', 'most_in_steps')}"
        ),
        "least_in_steps": Value(f"{step}.0 * rows"),
        "pairs_in_steps": Value("pairs_by_sums", larger("pairs_by_sums", "least_in_steps")),
    }


def steps_in_turn(sums: str, about: str, slots: int) -> dict[str, Value]:
    """`steps_in_turn`: pairs in whole steps, if every slot went on until the last row ends.

    `sums` is their formula by a batch's sums, and `about` one of unequal sequences of known
    lengths: but no slot is done before the longest row or an even share, and no row takes longer
    than the longest. The values of `pairs_in_steps` must be before it.
    """
    least = f"{slots}.0 * longest_in_steps, pairs_in_steps"
    most = f"-(-q_tokens // {slots}) * {slots}.0 * longest_in_steps"
    unequal = f"q_tokens > {slots} and max_kv > {FLASHMLA_STEP} and {_UNEQUAL}"
    by_lengths = f"min(max({about}, {least}), {most}) if {unequal} else steps_by_sums"
    return {
        "steps_by_sums": Value(sums),
        "steps_in_turn": Value("steps_by_sums", by_lengths),
    }


def keys_until_the_end(batch: Batch, topk: int, slots: int) -> float:
    """Keys that one of `slots` goes through until the last row ends: rows are begun in their order,
    each in the slot that is free first. A sequence's rows count as equal: each has their mean."""
    kv_lens, new_lens = batch.kv_lens, batch.new_lens
    assert kv_lens is not None
    assert new_lens is not None
    if batch.q_tokens > MOST_TURNS * slots:
        return _end_of_many(kv_lens, new_lens, topk, slots)
    each = max(new_lens)
    if each * batch.batch_size == batch.q_tokens and not slots % each:
        # Slots that begin a sequence's rows are free together: they are as one.
        half = each // 2
        keys = [kv - half if kv <= topk else mean_keys(kv, each, topk) for kv in kv_lens]
        return _end_of_single_rows(keys, slots // each)
    return until_the_end(
        ((mean_keys(kv, new, topk), new) for kv, new in zip(kv_lens, new_lens, strict=True)), slots
    )


def mean_keys(kv: int, new: int, topk: int) -> float:
    """Keys that a row of a sequence attends to on average: one more each, up to `topk`. Below it
    half a key is dropped or added."""
    if kv <= topk:
        return kv - new // 2
    fewer = topk - kv + new
    return topk if fewer <= 0 else topk - fewer * (fewer - 1) / (2 * new)


def _end_of_many(kv_lens: Iterable[int], new_lens: Iterable[int], topk: int, slots: int) -> float:
    """About the same for many rows a slot: the last row of each sequence begins when the slots have
    done half of the rows that they are at, and all before those."""
    begun, at, end = 0.0, 0.0, 0.0
    for kv, new in zip(kv_lens, new_lens, strict=True):
        # As `mean_keys` says for all rows: calling it would take as long as everything else.
        if kv <= topk:
            last = kv
            begun += new * (kv - new // 2)
        else:
            last, fewer = topk, topk - kv + new
            begun += new * topk - (fewer * (fewer - 1) / 2 if fewer > 0 else 0)
        at += (last - at) * (new / slots if new < slots else 1.0)
        over = last - at / 2 + (begun - last) / slots
        if over > end:
            end = over
    return max(end, begun / slots)


def until_the_end(runs: Iterable[tuple[float, int]], slots: int) -> float:
    """The time until the last row ends, of runs of (a row's time, rows): rows are begun in their
    order, each in the slot that is free first."""
    # After so much time so many slots are free. The first rows need not look for one.
    free: list[tuple[float, int]] = []
    room = slots
    for time, left in runs:
        if room:
            begun = min(left, room)
            free.append((time, begun))
            left -= begun
            room -= begun
            if not room:
                heapify(free)
        while left > 0:
            start, count = free[0]
            if left < count:
                heapreplace(free, (start, count - left))
                heappush(free, (start + time, left))
            else:
                heapreplace(free, (start + time, count))
            left -= count
    return max(free)[0]


def _end_of_single_rows(keys: list[float], slots: int) -> float:
    """The same for a row a sequence, in a third of the time."""
    free = keys[:slots]
    heapify(free)
    for one in keys[slots:]:
        heapreplace(free, free[0] + one)
    return max(free)


def fa3(setting: Setting) -> dict[str, Value]:
    """FlashAttention-3: tiles of a row's heads, and blocks of 64 keys that each goes through.

    A device's share of all blocks, and a tenth more, is the most that one tile gets; longer rows
    are split (`prepare_varlen_num_blocks_kernel`). `blocks` takes rows that are shorter than the
    longest to be half as long on average: then each has half a block of padding.

    No row gets more parts than fit well into whole waves if all rows were full (`fa3_most_parts`).
    Sequences of unequal lengths are looked at one by one (`fa3_unequal`). `attended_pairs` and
    `all_full` must be values before these, and the point's functions must have `fa3_functions`.
    """
    sms, tiles = _sms(setting), -(-setting.heads // _TILE_HEADS)
    share = f"-(-blocks * {11 * tiles} // {10 * sms})"
    equal = (
        "(tile_waves * -(-key_blocks // key_parts), row_parts if key_parts > 1.0 else 0.0, "
        "1.0 if key_parts > 1.0 else 0.0)"
    )
    return {
        "distinct_keys": DISTINCT_KEYS,
        **long_rows(setting.profile.index_topk),
        "key_blocks": Value(f"-(-longest // {_BLOCK_KEYS}.0)"),
        "blocks": Value("long_rows * key_blocks + rows - long_rows"),
        "most_parts": Value("fa3_most_parts(q_tokens)"),
        "even_parts": Value(f"-(-key_blocks // {share})"),
        "key_parts": Value(smaller("even_parts", "most_parts")),
        "row_parts": Value("long_rows * key_parts"),
        **waves("tile_waves", "row_parts", sms / tiles),
        "blocks_of_the_busiest, parts_merged, merges": Value(
            equal, f"fa3_unequal(batch, most_parts) if {_UNEQUAL} else {equal}"
        ),
        "turns": Value(f"-(-rows * {tiles} // {sms})"),
        # Each wave of parts ends with writing what a wave of whole rows does not.
        "waves_merged": Value(f"-(-parts_merged * {tiles} // {sms})"),
    }


def fa3_functions(setting: Setting) -> dict[str, Callable[..., Any]]:
    """What the formulas of `fa3` call."""
    return {"fa3_most_parts": fa3_most_parts(setting), "fa3_unequal": fa3_unequal(setting)}


def fa3_unequal(setting: Setting) -> Callable[[Batch, float], tuple[float, float, float]]:
    """A function of a batch and the most parts of a row: blocks of the busiest SM, parts that are
    merged, and whether any are. Longer rows are begun first; a sequence's rows count as equal."""
    sms, topk = _sms(setting), setting.profile.index_topk
    tiles = -(-setting.heads // _TILE_HEADS)

    def unequal(batch: Batch, most_parts: float) -> tuple[float, float, float]:
        kv_lens, new_lens = batch.kv_lens, batch.new_lens
        assert kv_lens is not None
        assert new_lens is not None
        rows = [
            (int(-(-mean_keys(kv, new, topk) // _BLOCK_KEYS)), new)
            for kv, new in zip(kv_lens, new_lens, strict=True)
        ]
        share = -(-sum(blocks * count for blocks, count in rows) * 11 * tiles // (10 * sms))
        most, merged, runs = int(most_parts), 0, []
        for blocks, count in rows:
            parts = min(-(-blocks // share), most)
            runs.append((-(-blocks // parts), count * parts * tiles))
            merged += parts * count if parts > 1 else 0
        if sum(count for _, count in runs) <= MOST_TURNS * sms:
            busiest = float(until_the_end(sorted(runs, reverse=True), sms))
        else:
            busiest = sum(blocks * count for blocks, count in runs) / sms
        return busiest, float(merged), float(merged > 0)

    return unequal


def fa3_most_parts(setting: Setting) -> Callable[[int], float]:
    """A function of a batch's rows: into how many parts FlashAttention-3 splits one at most.

    Of the numbers of parts that fill the last wave of all full tiles nearly as well as the best
    one does, it takes the smallest; 1 where the tiles nearly fill the device
    (`num_splits_heuristic`). Upstream counts one row's tiles only. By its times sglang-kernel
    counts those of all rows, and a tile that is not full of heads as a part of one
    (docs/policy.md).
    """
    sms = _sms(setting)
    most_blocks = -(-setting.profile.index_topk // _BLOCK_KEYS)
    rows = ceil(_FULL * sms * _TILE_HEADS / setting.heads)

    # Only for rows that occur: all of them would take longer than opening a table.
    @cache
    def of_few(count: int) -> float:
        return _most_parts(-(-count * setting.heads // _TILE_HEADS), sms, most_blocks)

    return lambda count: 1.0 if count >= rows else of_few(count)


def _most_parts(tiles: int, sms: int, blocks: int) -> float:
    filled = []
    for parts in range(1, min(sms, blocks) + 1):
        waves = tiles * parts / sms
        filled.append(waves / ceil(waves))
    return 1.0 + next(i for i, one in enumerate(filled) if one >= _NEARLY * max(filled))


def flashmla_kv(setting: Setting) -> dict[str, Value]:
    """FlashMLA's sparse decode kernel: equal parts of all rows' blocks, one for each 64 heads of an
    SM. It computes a whole selection for every row, of however few keys.

    A part ends early rather than begin a row that it has no time for (`get_mla_metadata`): then
    rows are whole, and nothing is merged.
    """
    row, parts = _flashmla_row(setting), split_parts(setting)
    return {
        "even_blocks": Value(f"(q_tokens * {row} + {parts - 1}) // {parts} + {FIXED_BLOCKS}.0"),
        "whole_blocks": Value(f"(q_tokens + {parts - 1}) // {parts} * {row}.0"),
        "blocks_of_the_fullest": Value(smaller("whole_blocks", "even_blocks")),
        # As even_blocks < whole_blocks, in a third of the time: so many rows fewer than the parts
        # would take leave room for more blocks than beginning a row costs.
        "splits_rows": Value(
            f"1.0 if -q_tokens % {parts} >= {-(-(FIXED_BLOCKS + 1) * parts // row)} else 0.0"
        ),
    }


def flashmla_grouped(setting: Setting) -> dict[str, Value]:
    """The same kernel with a sequence's queries in one row. A part then takes as many times more
    SMs as there are queries, so there are fewer parts."""
    row, parts = _flashmla_row(setting), split_parts(setting)
    return {
        "group_parts": Value(larger(f"{parts} * batch_size // q_tokens", "1")),
        "grouped_even_blocks": Value(f"-(-batch_size * {row} // group_parts) + {FIXED_BLOCKS}.0"),
        "grouped_whole_blocks": Value(f"-(-batch_size // group_parts) * {row}.0"),
        "grouped_blocks_of_the_fullest": Value(
            smaller("grouped_whole_blocks", "grouped_even_blocks")
        ),
        "grouped_splits_rows": Value("1.0 if grouped_even_blocks < grouped_whole_blocks else 0.0"),
    }


def flashmla_mixed(setting: Setting) -> dict[str, Value]:
    """The same kernel with all queries in one row, which makes each query parts of its own: as many
    as fit on the device at once, else one."""
    row, parts = _flashmla_row(setting), split_parts(setting)
    return {
        "mixed_waves": Value(f"(q_tokens + {parts - 1}) // {parts}"),
        "mixed_parts": Value(f"{parts} // q_tokens"),
        "mixed_blocks_of_the_fullest": Value(
            f"-(-{row} // mixed_parts) + {FIXED_BLOCKS}.0 if mixed_parts > 1 "
            f"else mixed_waves * {row}.0"
        ),
        "mixed_rows_split": Value("rows if mixed_parts > 1 else 0.0"),
    }


def _flashmla_row(setting: Setting) -> int:
    """Blocks' worth of time that FlashMLA takes for a row's whole selection."""
    return -(-setting.profile.index_topk // _BLOCK_KEYS) + FIXED_BLOCKS


def triton(setting: Setting) -> dict[str, Value]:
    """`kernels/sparse_mla.py`: a program takes 16, 32 or 64 heads of a row, and a power of two of
    programs share its selection. Empty places cost as much time as keys, but read nothing."""
    heads, roomy = setting.heads, setting.device.shared_memory_optin >= _ROOMY
    block = 64 if heads > 32 and roomy else 32 if heads > 16 and roomy else 16
    most = max(setting.profile.index_topk // 128, 1)
    return _programs("", setting, block, [(most, setting.device.sms * _PROGRAMS_AN_SM)])


def triton_split(setting: Setting) -> dict[str, Value]:
    """`kernels/split_sparse_mla.py`: likewise, with 16 heads a program and more parts."""
    most = -(-setting.profile.index_topk // 32)
    slots = setting.device.sms * _PROGRAMS_AN_SM
    return _programs("split_", setting, 16, [(min(most, 64), 2), (min(most, 32), slots)])


def _programs(
    kernel: str, setting: Setting, block: int, limits: list[tuple[int, int]]
) -> dict[str, Value]:
    """`block` heads a program; each of `limits`: the most parts of a row, and up to how many
    programs before splitting."""
    sms, blocks = _sms(setting), -(-setting.heads // block)
    parts, programs = f"{kernel}parts", f"{kernel}programs"
    return {
        "distinct_keys": DISTINCT_KEYS,
        parts: Value(_power_of_two(_PROGRAMS_AN_SM * sms, blocks, limits)),
        programs: Value(f"q_tokens * {parts} * {blocks}"),
        f"{kernel}keys_of_the_busiest": Value(
            f"({programs} + {sms - 1}) // {sms} * {setting.profile.index_topk}.0 / {parts}"
        ),
        f"{kernel}programs_merged": Value(f"{programs} if {parts} > 1 else 0.0"),
    }


def _power_of_two(slots: int, blocks: int, limits: list[tuple[int, int]]) -> str:
    """The formula of a row's parts: the most, a power of two, that leave each program a slot."""
    tests: dict[int, int] = {}
    for most, unsplit in limits:
        for power in range(most.bit_length() - 1, 0, -1):
            rows = min(slots >> power, unsplit) // blocks
            if rows > max(tests.values(), default=0):
                tests[1 << power] = rows
    return "".join(f"{n} if q_tokens <= {rows} else " for n, rows in tests.items()) + "1"


def _sms(setting: Setting) -> int:
    return max(setting.device.sms, 1)
