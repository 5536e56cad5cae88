"""What a run says of its remaining regret, against the truth on held-out batches; no GPU.

    python -m benchmarks.left_out [TABLE ...] [--seeds 3] [--rows 150,200,300,400,0] [--json]

Partial runs are replayed on whole grids that were measured: the adaptive search asks, and is given
what was recorded, until so many rows (0: until it ends by itself). Then the run's estimate (mean
regret by leaving measured batches out, and its upper end) is put beside the true mean regret on
held-out batches, and beside the search's own bound for the worst tenth, by which it steers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.adaptive import HELD_OUT, recorded_part, regrets, same_arms, setting_of
from nsa_tune.autotune.search.adaptive import TAIL, Adaptive
from nsa_tune.autotune.search.left_out import left_out
from nsa_tune.backend.costmodel.regret import tail_mean
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.records import Measurement, Table
from nsa_tune.db import reader as tables
from nsa_tune.db.text_table import read_text


@dataclass(frozen=True, slots=True)
class Row:
    """One question of one partial run."""

    table: str
    question: str
    seed: int
    rows: int
    """Measurements of the run."""
    most_rows: int
    """What it was stopped at; 0 for where it ended by itself."""
    estimate: float
    most: float
    batches: int
    """Batches that were left out in turn."""
    true_mean: float
    true_tail: float
    """Mean of the worst tenth."""
    bound: float
    """The search's own bound for the worst tenth."""


def partial_run(
    table: Table, most_rows: int, seed: int
) -> tuple[list[Measurement], dict[str, float]]:
    """The rows of an adaptive run that is stopped after `most_rows`, and the search's bounds."""
    recorded = {(row.point, row.batch, row.arm): row for row in table.measurements}
    points = [recorded_part(point, table) for point in POINTS.values()]
    schedule = Adaptive([point for point in points if point.arms], setting_of(table), (), seed=seed)
    rows: list[Measurement] = []
    while (not most_rows or len(rows) < most_rows) and (job := schedule.next()) is not None:
        names = [(job.point.name, str(job.batch), arm.name) for arm in job.arms]
        found = [recorded[name] for name in names if name in recorded]
        schedule.done(job, found)
        rows += found
    return rows, schedule.expected_regret()


def held_out_of(path: Path) -> Table | None:
    """All held-out batches of the table `path`; None without any."""
    places = (HELD_OUT / path.name, HELD_OUT / "later" / path.name)
    found = [read_text(place) for place in places if place.exists()]
    if not found:
        return None
    return replace(found[0], measurements=tuple(r for one in found for r in one.measurements))


def rows_of(path: Path, lengths: Sequence[int], seeds: int) -> Iterator[Row]:
    """A row for each question, length and seed."""
    table, held_out = read_text(path), held_out_of(path)
    if held_out is None:
        return
    table = same_arms(table, held_out)
    for seed in range(seeds):
        for most_rows in lengths:
            rows, bounds = partial_run(table, most_rows, seed)
            estimates = left_out(POINTS.values(), setting_of(table), rows)
            for question, losses in regrets(rows, table, held_out).items():
                one = estimates.get(question)
                if one is not None:
                    yield Row(
                        path.stem, question, seed, len(rows), most_rows, one.mean, one.most,
                        one.batches, fmean(losses), tail_mean([(x, 1.0) for x in losses], TAIL),
                        bounds.get(question, 0.0),
                    )  # fmt: skip


def _mean(rows: Sequence[Row], name: str) -> str:
    return f"{fmean(getattr(row, name) for row in rows):.2%}"


def _print(rows: Sequence[Row]) -> None:
    names = ("estimate", "most", "true_mean", "bound", "true_tail")
    print("| stopped at | rows | questions |", " | ".join(names), "| truth <= most |")
    print("|---" * (len(names) + 4) + "|")
    for length in dict.fromkeys(row.most_rows for row in rows):
        some = [row for row in rows if row.most_rows == length]
        figures = " | ".join(_mean(some, name) for name in names)
        count = f"{fmean(row.rows for row in some):.0f}"
        held = fmean(row.true_mean <= row.most for row in some)
        print(f"| {length or 'its end'} | {count} | {len(some)} | {figures} | {held:.0%} |")
    print()
    print("| table | question | rows |", " | ".join(names), "|")
    print("|---" * (len(names) + 3) + "|")
    ended = [row for row in rows if not row.most_rows]
    for table, question in dict.fromkeys((row.table, row.question) for row in ended):
        some = [row for row in ended if (row.table, row.question) == (table, question)]
        figures = " | ".join(_mean(some, name) for name in names)
        print(f"| {table} | {question} | {fmean(row.rows for row in some):.0f} | {figures} |")


def main() -> None:
    """Parse, replay and print."""
    parser = argparse.ArgumentParser(description="A run's estimate of its regret against truth.")
    parser.add_argument("tables", nargs="*", type=Path, default=tables.shipped())
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", default="150,200,300,400,0")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    lengths = [int(word) for word in arguments.rows.split(",")]
    rows = [row for path in arguments.tables for row in rows_of(path, lengths, arguments.seeds)]
    if arguments.json:
        json.dump({"schema": "nsa-tune/left-out/1", "rows": [*map(asdict, rows)]}, sys.stdout)
        return
    _print(rows)


if __name__ == "__main__":
    main()
