"""The adaptive sweep against the whole grid, replayed on a recorded grid: no GPU is needed.

    python benchmarks/adaptive.py [TABLE ...] [--target-regret 0.01] [--seeds 3] [--json]

Each table is a whole grid that was measured. The schedule asks for batches and is given what was
recorded of them. Then both tables, the one that it chose and the whole one, answer for batches
that neither was tuned on: the held-out file of the same name where there is one, and for the
adaptive one the part of the grid that it did not ask for ("rest"). `tail` is the mean regret of
the worst tenth of the batches, which is what a sweep estimates as `expected`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.regret import cells, timed_arms
from nsa_tune import Batch
from nsa_tune.autotune.search.adaptive import TAIL, Adaptive
from nsa_tune.backend.baselines import SGLANG_0_5_23
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.regret import tail_mean
from nsa_tune.backend.dispatch.decide import pick
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Table
from nsa_tune.db import reader as tables
from nsa_tune.db.text_table import read_text

HELD_OUT = Path(__file__).parent / "held_out"


@dataclass(frozen=True, slots=True)
class Replay:
    """What an adaptive sweep of a recorded grid asked for, and what that is worth."""

    rows: tuple[Measurement, ...]
    share: float
    """Measurements asked for, of those of the grid."""
    expected: dict[str, float]
    """The regret on the worst tenth of batches that it ended at, by question."""


def setting_of(table: Table) -> Setting:
    """The setting that `table` was measured in."""
    key = table.key
    layout = KVLayout(key.kv_layout)
    return Setting(profile_of(key.model), key.heads, layout, table.device, dict(key.libraries))


def recorded_part(point: Point, table: Table) -> Point:
    """`point` with the arms and the batches that `table` has.

    What was added to it since could be asked for, and would use up measurements without an answer.
    """
    rows = [row for row in table.measurements if row.point == point.name]
    arms = {row.arm for row in rows}
    kept = tuple(arm for arm in point.arms if arm.name in arms)
    grid = [Batch.parse(word) for word in sorted({row.batch for row in rows})]
    return replace(point, arms=kept, grid=lambda setting: grid)


def replay(table: Table, *, target_regret: float = 0.01, seed: int = 0) -> Replay:
    """Sweep `table` adaptively."""
    recorded = {(row.point, row.batch, row.arm): row for row in table.measurements}
    points = [recorded_part(point, table) for point in POINTS.values()]
    points = [point for point in points if point.arms]
    schedule = Adaptive(points, setting_of(table), (), target_regret=target_regret, seed=seed)
    rows: list[Measurement] = []
    while (job := schedule.next()) is not None:
        names = [(job.point.name, str(job.batch), arm.name) for arm in job.arms]
        found = [recorded[name] for name in names if name in recorded]
        schedule.done(job, found)
        rows += found
    return Replay(tuple(rows), len(rows) / len(recorded), schedule.expected_regret())


def regrets(rows: Iterable[Measurement], table: Table, held_out: Table) -> dict[str, list[float]]:
    """What the answers from `rows` lose on each batch of `held_out`, by question."""
    setting, rows = setting_of(table), list(rows)
    found: dict[str, list[float]] = {}
    for point in POINTS.values():
        policy = Policy.fit(point, setting, rows)
        for question in point.questions:
            for cell in cells(held_out, point.name, question):
                baseline = SGLANG_0_5_23.choose(question, cell.batch, setting)
                regret = cell.regret(pick(question, policy.survey(cell.batch), baseline)[0])
                if regret is not None:
                    found.setdefault(question.name, []).append(regret)
    return found


def same_arms(table: Table, held_out: Table) -> Table:
    """`table` without the arms that `held_out` has no times of, in the points that it has."""
    timed = timed_arms(held_out.measurements)
    points = {point for point, _ in timed}
    kept = (
        row for row in table.measurements
        if row.point not in points or (row.point, row.arm) in timed
    )  # fmt: skip
    return replace(table, measurements=tuple(kept))


def not_asked_for(table: Table, rows: Iterable[Measurement]) -> Table:
    """The batches of `table` of which no row is among `rows`."""
    asked = {(row.point, row.batch) for row in rows}
    left = tuple(row for row in table.measurements if (row.point, row.batch) not in asked)
    return replace(table, measurements=left)


def compare(path: Path, target_regret: float, seeds: Sequence[int]) -> list[dict[str, object]]:
    """One row a question: the regret of both tables, and what they took; the mean of `seeds`."""
    table = read_text(path)
    held_out = read_text(HELD_OUT / path.name) if (HELD_OUT / path.name).exists() else None
    if held_out is not None:
        table = same_arms(table, held_out)
    whole = regrets(table.measurements, table, held_out) if held_out else {}
    found: dict[str, list[dict[str, float]]] = {}
    for seed in seeds:
        swept = replay(table, target_regret=target_regret, seed=seed)
        outside = regrets(swept.rows, table, held_out) if held_out else {}
        rest = regrets(swept.rows, table, not_asked_for(table, swept.rows))
        for question, losses in rest.items():
            row = {"share": swept.share, "expected": swept.expected[question]}
            row |= _summary("rest_", losses)
            if question in outside:
                row |= _summary("", outside[question]) | _summary("grid_", whole[question])
            found.setdefault(question, []).append(row)
    return [
        {"table": path.stem, "question": question}
        | {name: fmean(row[name] for row in rows) for name in rows[0]}
        for question, rows in found.items()
    ]


def _summary(prefix: str, losses: Sequence[float]) -> dict[str, float]:
    """Mean, mean of the worst tenth, and worst."""
    tail = tail_mean([(loss, 1.0) for loss in losses], TAIL)
    named = {"mean": fmean(losses), "tail": tail, "worst": max(losses)}
    return {f"{prefix}{name}": value for name, value in named.items()}


def main() -> None:
    """Parse, replay and print."""
    parser = argparse.ArgumentParser(description="The adaptive sweep against the whole grid.")
    parser.add_argument("tables", nargs="*", type=Path, default=tables.shipped())
    parser.add_argument("--target-regret", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [
        row
        for path in arguments.tables
        for row in compare(path, arguments.target_regret, range(arguments.seeds))
    ]
    if arguments.json:
        json.dump({"schema": "nsa-tune/adaptive/1", "rows": rows}, sys.stdout)
        return
    names = ("share", "mean", "grid_mean", "tail", "grid_tail", "worst", "grid_worst", "rest_mean",
             "rest_tail", "expected")  # fmt: skip
    print("| table | question |", " | ".join(names), "|")
    print("|---" * (2 + len(names)) + "|")
    for row in rows:
        figures = " | ".join(f"{row[name]:.2%}" if name in row else "-" for name in names)
        print(f"| {row['table']} | {row['question']} | {figures} |")


if __name__ == "__main__":
    main()
