"""Adaptive runs on grids that were measured: each job is answered from a shipped table's rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks.regret import cells, held_out_tables, timed_arms
from nsa_tune import Batch
from nsa_tune.autotune.search.adaptive import Adaptive
from nsa_tune.backend.baselines import SGLANG_0_5_23
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.decide import pick
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Table
from nsa_tune.db.text_table import read_text

HELD_OUT = Path(__file__).parents[3] / "benchmarks" / "held_out"


def setting_of(table: Table) -> Setting:
    """The setting that `table` was measured in."""
    key = table.key
    layout = KVLayout(key.kv_layout)
    return Setting(profile_of(key.model), key.heads, layout, table.device, dict(key.libraries))


def recorded_part(point: Point, table: Table) -> Point:
    """`point` with the arms and the batches that `table` has."""
    rows = [row for row in table.measurements if row.point == point.name]
    arms = {row.arm for row in rows}
    grid = [Batch.parse(word) for word in sorted({row.batch for row in rows})]
    kept = tuple(arm for arm in point.arms if arm.name in arms)
    return replace(point, arms=kept, grid=lambda setting: grid)


def replay(table: Table, *, most_rows: int = 0, seed: int = 0) -> list[Measurement]:
    """The rows of a run that ends by itself or after `most_rows`."""
    recorded = {(row.point, row.batch, row.arm): row for row in table.measurements}
    points = [recorded_part(point, table) for point in POINTS.values()]
    schedule = Adaptive([point for point in points if point.arms], setting_of(table), (), seed=seed)
    rows: list[Measurement] = []
    while (not most_rows or len(rows) < most_rows) and (job := schedule.next()) is not None:
        names = [(job.point.name, str(job.batch), arm.name) for arm in job.arms]
        answers = [recorded[name] for name in names if name in recorded]
        schedule.done(job, answers)
        rows += answers
    return rows


def regrets(rows: Iterable[Measurement], table: Table, held_out: Table) -> dict[str, list[float]]:
    """What the answers from `rows` lose on each batch of `held_out`, by question."""
    setting, rows = setting_of(table), list(rows)
    losses: dict[str, list[float]] = {}
    for point in POINTS.values():
        policy = Policy.fit(point, setting, rows)
        for question in point.questions:
            for cell in cells(held_out, point.name, question):
                baseline = SGLANG_0_5_23.choose(question, cell.batch, setting)
                regret = cell.regret(pick(question, policy.survey(cell.batch), baseline)[0])
                if regret is not None:
                    losses.setdefault(question.name, []).append(regret)
    return losses


def held_out_of(stem: str, *, later: bool = True) -> Table:
    """The held-out batches of a table; with `later`, those of the second seed too."""
    tables = [read_text(HELD_OUT / f"{stem}.tsv")]
    if later:
        tables.append(dict(held_out_tables(HELD_OUT / "later.zip"))[f"later/{stem}.tsv"])
    return replace(tables[0], measurements=tuple(row for t in tables for row in t.measurements))


def same_arms(table: Table, held_out: Table) -> Table:
    """`table` without the arms that `held_out` has no times of, in the points that it has."""
    timed = timed_arms(held_out.measurements)
    points = {point for point, _ in timed}
    kept = (
        row for row in table.measurements
        if row.point not in points or (row.point, row.arm) in timed
    )  # fmt: skip
    return replace(table, measurements=tuple(kept))
