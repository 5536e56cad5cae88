"""How well two measurements of the same grid repeat: differences, and batches that changed winner.

    python -m benchmarks.repeat BEFORE AFTER [--json]

Both are text tables of one key (`nsa-tune db export`). A verdict is that of the two arms' stored
intervals: a win excludes 1 %, a tie is within it, and all else is unsure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path

from nsa_tune.autotune.bench.ceilings import POINT as CEILINGS
from nsa_tune.autotune.bench.race import verdict_of
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.text_table import read_text

Cells = dict[tuple[str, str], dict[str, Measurement]]
"""By point and batch, then by arm."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A batch on which another arm was faster the second time."""

    point: str
    batch: str
    winner_before: str
    winner_after: str
    lead_before: float
    """Of the first winner over the second one, in each measurement as its own winner leads."""
    lead_after: float
    verdict_before: str
    verdict_after: str


def cells_of(table: Table) -> Cells:
    """The successful measurements of decision points."""
    found: Cells = {}
    for row in table.measurements:
        if row.status is Status.OK and row.point != CEILINGS:
            found.setdefault((row.point, row.batch), {})[row.arm] = row
    return found


def differences(before: Cells, after: Cells) -> list[float]:
    """How far the second time of each arm is from the first one, relative, ascending."""
    pairs = (
        (one, after[cell][arm])
        for cell, arms in before.items()
        for arm, one in arms.items()
        if arm in after.get(cell, {})
    )
    return sorted(abs(_time(second) / _time(first) - 1) for first, second in pairs)


def changed(before: Cells, after: Cells) -> Iterator[Changed]:
    """The batches with the same arms in both whose winner is another one."""
    for (point, batch), arms in before.items():
        again = after.get((point, batch), {})
        if len(arms) < 2 or arms.keys() != again.keys():
            continue
        first, second = _winner(arms), _winner(again)
        if first != second:
            yield Changed(
                point, batch, first, second,
                _time(arms[second]) / _time(arms[first]) - 1,
                _time(again[first]) / _time(again[second]) - 1,
                _verdict(arms[first], arms[second]),
                _verdict(again[second], again[first]),
            )  # fmt: skip


def _time(row: Measurement) -> float:
    assert row.latency_us is not None
    return row.latency_us


def _winner(arms: Mapping[str, Measurement]) -> str:
    return min(arms, key=lambda arm: _time(arms[arm]))


def _verdict(winner: Measurement, other: Measurement) -> str:
    low = log((other.low_us or _time(other)) / (winner.high_us or _time(winner)))
    high = log((other.high_us or _time(other)) / (winner.low_us or _time(winner)))
    return str(verdict_of((low, high)))


def main() -> None:
    """Compare, and print figures or one JSON document."""
    parser = argparse.ArgumentParser(description="How well two measurements repeat.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    first, second = read_text(arguments.before), read_text(arguments.after)
    if first.key != second.key:
        apart = [f"{name}: {a} and {b}" for name, a, b in first.key.differences(second.key)]
        sys.exit(f"give two tables of one key; these differ: {'; '.join(apart)}")
    before, after = cells_of(first), cells_of(second)
    off = differences(before, after)
    moved = sorted(changed(before, after), key=lambda one: -max(one.lead_before, one.lead_after))
    shared = sum(
        len(arms) > 1 and arms.keys() == after.get(cell, {}).keys() for cell, arms in before.items()
    )
    figures = {
        "cells": len(off), "median": off[len(off) // 2], "p90": off[round(0.9 * (len(off) - 1))],
        "batches": shared, "changed": len(moved),
    }  # fmt: skip
    if arguments.json:
        document = {"schema": "nsa-tune/repeat/1", **figures, "moved": [asdict(m) for m in moved]}
        json.dump(document, sys.stdout)
        return
    spread = f"{figures['median']:.2%} (median) and {figures['p90']:.2%} (p90)"
    print(f"{first.key.gpu}: {len(off)} times differ by {spread}")
    print(f"{len(moved)} of {shared} batches changed winner")
    for one in moved:
        print(f"{one.point} {one.batch}: {one.winner_before} ({one.verdict_before}, by "
              f"{one.lead_before:.1%}), then {one.winner_after} ({one.verdict_after}, by "
              f"{one.lead_after:.1%})")  # fmt: skip


if __name__ == "__main__":
    main()
