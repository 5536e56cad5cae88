"""What V4's two kernels do with a batch's rows.

A row attends to its window and to compressed tokens. `with_kvcache` reads them from two pools,
each in blocks of 64 keys; its schedule deals all blocks to the SMs in equal parts, so that rows may
be split. `sparse_fwd` goes through one copy, 128 keys a step, each row on the SM that is free
first. Most rows have as many blocks as the row before them, so they are kept as runs of equal ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from nsa_tune.backend.points.splits import FIXED_BLOCKS, MOST_TURNS, until_the_end

_BLOCK, _STEP = 64, 128


class Run(NamedTuple):
    """Consecutive rows that are alike."""

    rows: int
    blocks: int
    """Of 64 keys, of both pools: each has at least one."""
    steps: int
    """Of 128 keys, of window and compressed tokens in one."""


class Work(NamedTuple):
    """What a layer computes. All are floats: a product of two takes a third of a mixed one's
    time."""

    blocks_of_the_fullest: float
    """What the fullest part goes through; to begin a row takes about as long as a block."""
    splits_rows: float
    """1 where the schedule splits any row, else 0."""
    parts_merged: float
    """Parts of rows that are split."""
    steps: float
    """Of all rows."""
    steps_of_the_busiest: float
    """What a slot of SMs goes through until the last row ends; beginning a row counts as one."""


def work_of(
    sequences: Iterable[tuple[int, int, int]],
    ratio: int, most: int, window: int, parts: int, slots: int,
) -> Work:  # fmt: skip
    """The work of `sequences`: (prefix, new tokens, how many like this).

    `most` is the most compressed tokens that a query attends to, `parts` the schedule's, `slots`
    the rows that `sparse_fwd` computes at once. More than four rows a part or slot are not played
    through; then every part counts as one of a split row.
    """
    runs = [run for one in sequences for run in runs_of_rows(*one, ratio, most, window)]
    rows = sum(run.rows for run in runs)
    steps = sum(run.rows * run.steps for run in runs)
    fullest: float
    if rows <= MOST_TURNS * parts:
        fullest, merged = schedule(runs, parts)
    else:
        fullest, merged = _fullest_of_many(runs, rows, parts), parts
    if rows <= MOST_TURNS * slots:
        busiest: float = until_the_end(((run.steps + 1, run.rows) for run in runs), slots)
    else:
        busiest = (steps + rows) / slots + max(run.steps for run in runs) / 2
    return Work(float(fullest), float(merged > 0), float(merged), float(steps), float(busiest))


def _fullest_of_many(runs: Sequence[Run], rows: int, parts: int) -> float:
    """About what the fullest part goes through, of many rows. Parts are equal by the schedule's
    count, in which a short row's beginning weighs more than it takes: so the fullest has as many
    long rows that follow one another as fit, and is else as all are."""
    blocks = sum(run.rows * run.blocks for run in runs)
    done, counted = blocks + rows, blocks + FIXED_BLOCKS * rows
    each, room = done / counted, counted / parts + FIXED_BLOCKS
    weighed = [(run.rows, run.blocks + FIXED_BLOCKS, run.blocks + 1) for run in runs]
    return 1 + _most_ahead(weighed, each, room) + done / parts


def _most_ahead(runs: Sequence[tuple[int, int, int]], each: float, room: float) -> float:
    """By how much rows that follow one another, counted as `room` together, can take longer than
    `each` times that; 0 at least. `runs` are (rows, what one counts as, what one takes)."""
    most = ahead = counted = 0.0
    first = 0
    for at, (rows, own, takes) in enumerate(runs):
        longer = takes - own * each
        if longer > 0:
            # Where this run does not fit behind the window's, the window ends within it. Then the
            # next one begins with the run after the window's first.
            while first < at and counted + rows * own > room:
                most = max(most, ahead + (room - counted) / own * longer)
                former, its_own, its_takes = runs[first]
                ahead -= former * (its_takes - its_own * each)
                counted -= former * its_own
                first += 1
            fit = min(rows, room / own)
            if fit == rows:
                ahead += rows * longer
                counted += rows * own
                most = max(most, ahead)
                continue
            most = max(most, fit * longer)
        first, ahead, counted = at + 1, 0.0, 0.0
    return most


def runs_of_rows(
    prefix: int, new: int, count: int, ratio: int, most: int, window: int
) -> Iterator[Run]:
    """The rows of `count` equal sequences, in their order. `most` is at least what fits into the
    window, `window // ratio`."""
    position, end, runs = prefix + 1, prefix + new, []
    while position <= end:
        extra, in_window = min(position // ratio, most), min(position, window)
        begun = max(extra - 1, 0) // _BLOCK + 1
        steps = -(-(in_window + extra) // _STEP)
        after = min(begun * _BLOCK, steps * _STEP - in_window) + 1
        last = min(end, ratio * after - 1) if after <= most else end
        if position <= window:
            last = min(last, next(one for one in _ends_in_window(ratio, window) if one >= position))
        runs.append(Run(last + 1 - position, -(-in_window // _BLOCK) + begun, steps))
        position = last + 1
    for _ in range(count):
        yield from runs


@lru_cache(maxsize=64)
def _ends_in_window(ratio: int, window: int) -> tuple[int, ...]:
    """Positions up to the window's end behind which a block of it, or a step, begins."""

    def begun(position: int) -> tuple[int, int]:
        return -(-position // _BLOCK), -(-(position + position // ratio) // _STEP)

    inner = [one for one in range(1, window) if begun(one) != begun(one + 1)]
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
