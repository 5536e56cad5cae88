"""Prefill passes of a replayed trace, drawn as a list that an engine can run one by one.

    python benchmarks/draw_passes.py TRACE --out GRID.jsonl [--passes 100] [--most-kv 250000]

Half of the passes are drawn evenly, so that what is frequent comes often. The other half is spread
over kinds of passes (octaves of new tokens and of cached ones, one sequence or several), so that
rare kinds come too. Each line is {"prefix": [...], "new": [...]}, tokens of each sequence. A prefix
is a whole number of pages, which is all that an engine keeps in its cache. Small passes come first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import TypeAlias

from nsa_tune.autotune.workload.requests import read_requests
from nsa_tune.autotune.workload.simulation import SchedulerConfig, passes

Lengths: TypeAlias = tuple[tuple[int, int], ...]
"""(prefix, new) of each sequence."""

_PAGE = 64


def whole_pages(lengths: Iterable[tuple[int, int]]) -> Lengths:
    """The same pass with each prefix cut to whole pages."""
    return tuple((prefix // _PAGE * _PAGE, new) for prefix, new in lengths)


def kind(lengths: Lengths) -> tuple[int, int, bool]:
    """Octaves of new and of cached tokens, and whether there are several sequences."""
    new, prefix = sum(n for _, n in lengths), sum(p for p, _ in lengths)
    return new.bit_length(), prefix.bit_length(), len(lengths) > 1


def drawn(found: list[Lengths], count: int, random: Random) -> list[Lengths]:
    """`count` different passes: half of them evenly, the others in turns from each kind."""
    random.shuffle(found)
    chosen = dict.fromkeys(found[: count // 2])
    kinds: dict[tuple[int, int, bool], list[Lengths]] = {}
    for one in found:
        kinds.setdefault(kind(one), []).append(one)
    while len(chosen) < count and any(kinds.values()):
        for _, some in sorted(kinds.items()):
            if some and len(chosen) < count:
                chosen[some.pop()] = None
    return sorted(chosen, key=lambda one: (sum(p + n for p, n in one), one))


def extends(trace: Path, scheduler: SchedulerConfig, most_kv: int) -> Iterator[Lengths]:
    """The prefill passes of a replay that fit."""
    for one in passes(read_requests(trace), scheduler):
        if one.is_extend:
            lengths = whole_pages(one.batch().lens or ())
            if sum(p + n for p, n in lengths) <= most_kv:
                yield lengths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--passes", type=int, default=100)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--most-kv", type=int, default=250_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    scheduler = SchedulerConfig(chunk_tokens=given.chunk, next_n=1)
    found = list(extends(given.trace, scheduler, given.most_kv))
    grid = drawn(found, given.passes, Random(given.seed))
    lines = [json.dumps({"prefix": [p for p, _ in g], "new": [n for _, n in g]}) for g in grid]
    given.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(
        f"{len(grid)} of {len(found)} passes, with {sum(p for g in grid for p, _ in g)} cached "
        f"tokens and {sum(n for g in grid for _, n in g)} new ones"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
