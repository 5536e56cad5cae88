"""What V4's two kernels do with a batch's rows.

A row attends to its window and to compressed tokens. `with_kvcache` reads them from two pools,
each in blocks of 64 keys; its schedule deals all blocks to the SMs in equal parts, so that rows may
be split. `sparse_fwd` goes through one copy, 128 keys a step. Most rows have as many blocks as the
row before them, so they are kept as runs of equal ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from nsa_tune.backend.points.schedules import BLOCK, FIXED_BLOCKS, STEP

_MOST_TURNS = 4
"""Rows a part up to which the schedule is followed."""


class Run(NamedTuple):
    """Consecutive rows that are alike."""

    rows: int
    blocks: int
    """Of 64 keys, of both pools: each has at least one."""
    steps: int
    """Of 128 keys, of window and compressed tokens in one."""


def split_schedule(runs: Sequence[Run], parts: int) -> tuple[float, bool]:
    """Blocks that the fullest part of `with_kvcache`'s schedule goes through, and whether any row
    is split.

    Of more than `_MOST_TURNS` rows a part that is an even share: the schedule matters less there,
    and takes longer to follow.
    """
    rows = sum(run.rows for run in runs)
    if rows <= _MOST_TURNS * parts:
        fullest, merged = schedule(runs, parts)
        return float(fullest), merged > 0
    return sum(run.rows * (run.blocks + 1) for run in runs) / parts + 1, True


def runs_of_rows(
    prefix: int, new: int, count: int, ratio: int, most: int, window: int
) -> Iterator[Run]:
    """The rows of `count` equal sequences, in their order. `most` is at least what fits into the
    window, `window // ratio`."""
    position, end, runs = prefix + 1, prefix + new, []
    while position <= end:
        extra, in_window = min(position // ratio, most), min(position, window)
        begun = max(extra - 1, 0) // BLOCK + 1
        steps = -(-(in_window + extra) // STEP)
        after = min(begun * BLOCK, steps * STEP - in_window) + 1
        last = min(end, ratio * after - 1) if after <= most else end
        if position <= window:
            last = min(last, next(end for end in _ends_in_window(ratio, window) if end >= position))
        runs.append(Run(last + 1 - position, -(-in_window // BLOCK) + begun, steps))
        position = last + 1
    for _ in range(count):
        yield from runs


@lru_cache(maxsize=64)
def _ends_in_window(ratio: int, window: int) -> tuple[int, ...]:
    """Positions up to the window's end behind which a block of it, or a step, begins."""

    def begun(position: int) -> tuple[int, int]:
        return -(-position // BLOCK), -(-(position + position // ratio) // STEP)

    inner = [last for last in range(1, window) if begun(last) != begun(last + 1)]
    return (*inner, window)


def schedule(runs: Iterable[Run], parts: int) -> tuple[int, int]:
    """FlashMLA's schedule (`get_decoding_sched_meta.cu`): blocks of the fullest of `parts`, with
    one for each row it begins, and how many parts of split rows there are.

    A part takes whole rows while it has time for them. It takes the beginning of the next row if
    it has more time left than the schedule counts for beginning one.
    """
    left = [[run.rows, run.blocks] for run in runs]
    total = sum(rows * (blocks + FIXED_BLOCKS) for rows, blocks in left)
    time = -(-total // parts) + FIXED_BLOCKS
    left.reverse()
    fullest = merged = done = pieces = 0
    while left:
        room, taken = time, 0
        while left:
            rows, blocks = left[-1]
            need = blocks - done + FIXED_BLOCKS
            if room < need:
                if room > FIXED_BLOCKS:
                    done += room - FIXED_BLOCKS
                    taken += room - FIXED_BLOCKS + 1
                    pieces += 1
                break
            finished, first = 1 if done else min(rows, room // need), not taken
            room -= finished * need
            taken += finished * (need - FIXED_BLOCKS + 1)
            if done:
                merged += pieces + 1
                done = pieces = 0
            elif first and room <= FIXED_BLOCKS:
                # Nothing is split: as many parts as these rows fill are alike.
                finished *= rows // finished
            left[-1][0] -= finished
            if not left[-1][0]:
                left.pop()
        fullest = max(fullest, taken)
    return fullest, merged
