"""The keys that DeepGEMM's ragged logits make the busiest SM go through.

`fp8_mqa_logits` computes a block of two or four rows at once, over all keys from the first that any
of them sees to the last. Blocks are dealt to the SMs in turn, whatever their keys: a few rows with
a long context among many with a short one leave most SMs idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

_Rows: TypeAlias = tuple[int, int, int]
"""Rows of one sequence: its first key, among the gathered keys of all sequences; its keys before
the first of these rows; and how many they are."""


def keys_of_the_busiest(
    sequences: Iterable[tuple[int, int, int]], rows_a_block: int, sms: int, rows_a_chunk: int
) -> float:
    """Keys that the busiest SM goes through, summed over chunks of `rows_a_chunk` rows.

    `sequences`: (prefix, new tokens, how many like this). Whole blocks of one count as equal.
    """
    parts = _chunks(sequences, rows_a_chunk)
    return sum(_busiest(_blocks(rows, rows_a_block), sms) for rows in parts)


def _chunks(sequences: Iterable[tuple[int, int, int]], most: int) -> Iterator[list[_Rows]]:
    begin, room = 0, most
    part: list[_Rows] = []
    for prefix, new, count in sequences:
        for _ in range(count):
            done = 0
            while done < new:
                taken = min(room, new - done)
                part.append((begin, prefix + done, taken))
                done += taken
                room -= taken
                if not room:
                    yield part
                    part, room = [], most
            begin += prefix + new
    if part:
        yield part


def _blocks(parts: Sequence[_Rows], size: int) -> Iterator[tuple[int, float]]:
    """(blocks, keys of each) that are alike, in their order."""
    filled = first = end = 0
    for begin, before, count in parts:
        row = 0
        if filled:
            # This block began with the rows of sequences before.
            row = min(count, size - filled)
            filled += row
            end = begin + before + row
            if filled < size:
                continue
            yield 1, end - first
            filled = 0
        whole = (count - row) // size
        if whole:
            yield whole, before + row + size * (whole + 1) / 2
            row += whole * size
        if row < count:
            filled, first, end = count - row, begin, begin + before + count
    if filled:
        yield 1, end - first


def _busiest(blocks: Iterable[tuple[int, float]], sms: int) -> float:
    """Keys of the SM with the most, when blocks are dealt in turn."""
    every = level = 0.0
    changes: defaultdict[int, float] = defaultdict(float)
    at = 0
    for count, keys in blocks:
        every += count // sms * keys
        rest = count % sms
        if rest:
            changes[at] += keys
            over = at + rest - sms
            if over > 0:
                level += keys
            if over:
                changes[over % sms] -= keys
            at = (at + rest) % sms
    most = level
    for position in sorted(changes):
        level += changes[position]
        most = max(most, level)
    return every + most
