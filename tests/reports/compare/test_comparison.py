"""Whole comparisons: two made-up runs, and two tables that ship."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Guard, Limit, Setting
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.places import shipped
from nsa_tune.db.text_table import read_text
from nsa_tune.reports.compare.cell_verdicts import CellVerdict, JudgedCell
from nsa_tune.reports.compare.comparison import Comparison, Winner, compare
from nsa_tune.reports.compare.rendering import (
    comparison_document,
    comparison_tables,
    conclusion,
    title,
)
from nsa_tune.reports.formats.display_tables import DisplayTable
from tests.reports.synthetic import FLAT, STEEP, Cost, hash_of, real_table, toy_point, toy_table

POINT = toy_point()


def _toys(steep: Cost = STEEP, flat: Cost = FLAT, limit: int | None = None) -> Comparison:
    """The toy point as it is, against one with other costs."""
    points = {"toy": POINT}
    before = toy_table(POINT)
    if limit is None:
        return compare(before, toy_table(POINT, steep=steep, flat=flat), points=points)
    after = toy_table(toy_point(limit), steep=steep, flat=flat)
    return compare(before, after, points=points)


def _noise(arm: str, batch: Batch) -> float:
    """What runs of one version differ by: 0.3 % in the median."""
    return 1 + 0.02 * ((hash_of(f"{arm}{batch}again") % 1001) / 500 - 1) ** 3


@cache
def _again() -> Comparison:
    return compare(real_table(), real_table(scale=_noise))


def test_a_second_run_of_the_same_versions_is_the_same() -> None:
    comparison = _again()

    assert comparison.counts[CellVerdict.SAME] / len(comparison.cells) > 0.95
    assert comparison.winners == ()
    assert comparison.regressions(0.05) == []
    assert [one.field for one in comparison.differences] == []


def test_a_slower_arm_is_found_and_named() -> None:
    comparison = _toys(flat=lambda batch: 1.1 * FLAT(batch))

    by_arm = {one.arm: one for one in comparison.arms}
    assert by_arm["flat/a"].geomean == pytest.approx(1.1)
    assert by_arm["flat/a"].counts[CellVerdict.SLOWER] == 13
    assert by_arm["steep/a"].counts[CellVerdict.SAME] == 13
    regressions = comparison.regressions(0.05)
    assert regressions[0] == "flat/a takes 1.100x as long, in the mean of its cells"
    assert len(regressions) == 14
    assert comparison.regressions(0.2) == []


def test_a_slowdown_under_the_noise_of_a_cell_is_found_by_the_mean() -> None:
    comparison = _toys(flat=lambda batch: 1.06 * FLAT(batch))

    assert comparison.regressions(0.05) == ["flat/a takes 1.060x as long, in the mean of its cells"]


def test_a_broken_cell_is_a_regression_whatever_the_limit() -> None:
    table = toy_table(POINT)
    first = table.measurements[0]
    broken = Measurement("toy", first.batch, first.arm, Status.FAILED, reason="boom")
    after = replace(table, measurements=(broken, *table.measurements[1:]))

    comparison = compare(table, after, points={"toy": POINT})

    assert comparison.regressions(0.9) == [f"{first.arm} on {first.batch} broken: failed: boom"]


def test_a_layer_s_share_of_the_pass_is_compared_with_it() -> None:
    """What is computed once a pass and grew by ten layers' times is a sixth of each layer's."""
    before = toy_table(POINT)
    layers = Setting.of(before).sharing
    rows = tuple(
        replace(row, pass_us=10 * row.latency_us) if row.latency_us else row
        for row in before.measurements
    )
    comparison = compare(before, replace(before, measurements=rows), points={"toy": POINT})

    assert {one.arm: one.geomean for one in comparison.arms} == {
        "steep/a": pytest.approx(1 + 10 / layers), "flat/a": pytest.approx(1 + 10 / layers),
    }  # fmt: skip
    assert comparison.counts[CellVerdict.SLOWER] == len(comparison.cells)


def test_a_batch_with_another_sure_winner_is_named() -> None:
    comparison = _toys(steep=lambda batch: 10 + 2 * batch.q_tokens)

    assert comparison.winners == (Winner("toy_path", "extend:0+64", "steep", "flat"),)


@pytest.mark.parametrize("verdict", [CellVerdict.ONLY_BEFORE, CellVerdict.ONLY_AFTER])
def test_cells_of_one_side_only_have_a_verdict_of_their_own(verdict: CellVerdict) -> None:
    whole = toy_table(POINT)
    part = replace(whole, measurements=whole.measurements[2:])
    sides = (whole, part) if verdict is CellVerdict.ONLY_BEFORE else (part, whole)

    found = compare(*sides, points={"toy": POINT})
    alone = [cell for cell in found.cells if cell.verdict is verdict]

    assert {(cell.arm, cell.batch) for cell in alone} == {
        ("steep/a", "extend:0+1"), ("flat/a", "extend:0+1"),
    }  # fmt: skip
    assert all(cell.reason == "not measured on the other side" for cell in alone)
    assert {one.counts[verdict] for one in found.arms} == {1}
    assert found.regressions(0.0) == []
    assert conclusion([found], None) == f"24 cells: 24 same, 2 {verdict} (100.0% same)"


def test_a_limit_that_keeps_an_arm_from_the_other_side_is_named() -> None:
    def reached(setting: Setting) -> Limit:
        most = 1024 * setting.device.l2
        return lambda batch: f"more than {most} tokens" if batch.q_tokens > most else None

    point = replace(
        POINT,
        arms=tuple(
            replace(arm, guards=(Guard("l2", "formula", "made up", reached),))
            if arm.name == "steep/a" else arm
            for arm in POINT.arms
        ),
    )  # fmt: skip
    roomy = toy_table(POINT)
    small = replace(
        roomy,
        device=replace(roomy.device, l2=2),
        measurements=tuple(
            row for row in roomy.measurements
            if row.arm == "flat/a" or Batch.parse(row.batch).q_tokens <= 2048
        ),
    )  # fmt: skip

    found = compare(roomy, small, points={"toy": point})

    (lost,) = (cell for cell in found.cells if cell.verdict is CellVerdict.ONLY_BEFORE)
    assert lost.batch == "extend:0+4096"
    assert lost.reason == "not allowed on the other side: more than 2048 tokens"


def test_the_fingerprints_differ_field_by_field() -> None:
    before = toy_table(POINT)
    key = replace(before.key, driver="1.2", libraries=(("torch", "9.9"),))
    after = replace(before, key=key, device=replace(before.device, l2=7), measured_at="later")

    differences = compare(before, after, points={"toy": POINT}).differences

    assert {one.field: one.after for one in differences} == {
        "driver": "1.2", "torch": "9.9", "sgl-flash-mla": "absent", "sgl-deep-gemm": "absent",
        "flashinfer-python": "absent", "l2": "7", "measured_at": "later",
    }  # fmt: skip


# --- as text and as a document


def _grids(comparison: Comparison, *, every: bool = False) -> dict[str, DisplayTable]:
    return {grid.title: grid for grid in comparison_tables(comparison, every=every)}


def test_the_fingerprint_stands_on_top_and_same_cells_stay_out() -> None:
    before, slower = toy_table(POINT), toy_table(POINT, flat=lambda batch: 1.05 * FLAT(batch))
    after = replace(slower, key=replace(slower.key, driver="1.2"))
    comparison = compare(before, after, points={"toy": POINT})

    found = list(comparison_tables(comparison, every=False))

    assert [grid.title for grid in found] == [
        "What differs", "Arms", "Cells that are not the same",
    ]  # fmt: skip
    assert {row[0] for row in found[-1].rows} == {"slower"}
    for grid in found:
        assert {len(row) for row in grid.rows} == {len(grid.columns)}
    assert len(_grids(comparison, every=True)["Cells"].rows) == 26


def test_a_long_list_says_how_much_it_leaves_out() -> None:
    comparison = _toys(steep=lambda b: 1.2 * STEEP(b), flat=lambda b: 1.2 * FLAT(b))

    grid = _grids(comparison)["Cells that are not the same"]

    assert len(grid.rows) == 15
    assert grid.note == "And 11 more: --all lists every cell."


@pytest.mark.parametrize(
    ("flat", "fail_on", "end"),
    [
        (FLAT, None, "(100.0% same)"),
        (FLAT, 0.05, "(100.0% same); none by more than 5 %"),
        (lambda b: 1.06 * FLAT(b), 0.05, "; 1 regression of more than 5 %"),
        (lambda b: 1.2 * FLAT(b), 0.05, "; 14 regressions of more than 5 %"),
    ],
)
def test_the_conclusion_counts(flat: Cost, fail_on: float | None, end: str) -> None:
    line = conclusion([_toys(flat=flat)], fail_on)

    assert line.startswith("26 cells: ")
    assert line.endswith(end)


def test_nothing_in_common_is_said() -> None:
    table = toy_table(POINT)
    empty = replace(table, measurements=())

    assert "no cell" in conclusion([compare(table, empty, points={"toy": POINT})], None)


def test_the_document_is_json_with_a_versioned_schema() -> None:
    comparison = _toys(steep=lambda batch: 10 + 2 * batch.q_tokens)

    found = json.loads(json.dumps(comparison_document([comparison], 0.05), allow_nan=False))

    assert found["schema"] == "nsa-tune/compare/3"
    (one,) = found["comparisons"]
    assert one["counts"]["slower"] == comparison.counts[CellVerdict.SLOWER]
    assert one["cells"][0].keys() == set(JudgedCell.__slots__)
    assert one["other_winners"][0]["batch"] == "extend:0+64"
    assert found["regressions"] == comparison.regressions(0.05)


def test_the_title_names_setting_and_sides() -> None:
    assert title(_again()) == (
        "deepseek-v3.2, 128 local heads, fp8_packed: made up against made up"
    )


# --- the tables that ship


def _shipped(gpu: str) -> Table:
    tables = [read_text(path) for path in shipped() if "h16_fp8" in path.name]
    return next(table for table in tables if table.key.gpu == gpu)


def test_an_h200_against_an_h100_names_what_moved() -> None:
    comparison = compare(_shipped("NVIDIA H100 80GB HBM3"), _shipped("NVIDIA H200"))

    assert {"gpu", "memory"} <= {one.field for one in comparison.differences}
    means = {
        (one.point, one.arm): one.geomean for one in comparison.arms if one.geomean is not None
    }
    # Memory is faster, and with it whatever moves more than a schedule's few numbers.
    assert means["roofline", "copy"] < 0.85
    moving = [m for (point, _), m in means.items() if point in {"prefill", "indexer_layout"}]
    assert len(moving) >= 5
    assert all(mean < 1 for mean in moving)
    assert "sparse_prefill" in {winner.question for winner in comparison.winners}
