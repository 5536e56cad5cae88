"""The report over the real points."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nsa_tune._errors import StoreCorrupt, UnknownName
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.records import Status
from nsa_tune.reports.analysis.report import Section, build
from nsa_tune.reports.charts.rows import map_cells, map_rows
from nsa_tune.reports.formats.display_tables import (
    choices_table,
    cost_sentence,
    display_tables,
    fingerprint,
)
from tests.reports.synthetic import real_table, toy_point, toy_table


@pytest.fixture(scope="module")
def section() -> Section:
    return build([real_table()]).sections[0]


def test_every_question_of_every_measured_point_is_reported(section: Section) -> None:
    measured = (POINTS[name] for name in ("prefill", "indexer_layout"))
    questions = [question.name for point in measured for question in point.questions]

    assert [question.name for question in section.questions] == questions


def test_a_question_with_one_measured_choice_has_no_lines(section: Section) -> None:
    single = {question.name: question for question in section.questions if not question.lines}

    assert {name: question.measured for name, question in single.items()} == {
        "mha_kernel": ("fa3",)
    }
    assert choices_table(section).rows == (("Prefill: MHA kernel", "fa3"),)


def test_failures_are_grouped_by_arm_and_reason(section: Section) -> None:
    (failure,) = section.failures

    assert failure.arm == "mla/flashmla_kv"
    assert failure.reason.startswith("CUDA error")
    assert "extend:0+16384" in failure.batches


def test_grids_fit_their_columns(section: Section) -> None:
    for grid in display_tables(section, "a baseline"):
        assert grid.rows
        assert {len(row) for row in grid.rows} == {len(grid.columns)}
        assert max(grid.numeric, default=0) < len(grid.columns)


def test_neighbouring_lines_with_one_choice_are_one_row(section: Section) -> None:
    rows = [row for grid in display_tables(section, "a baseline") for row in grid.rows]

    folded = [row for row in rows if " to " in row[1]]
    assert ("1", "1792 to 126976", "mla throughout") in folded
    assert all("until" not in row[2] for row in folded)


def test_the_fingerprint_names_everything_that_the_table_is_valid_for(section: Section) -> None:
    card = dict(fingerprint(section))

    assert card["GPU"] == section.key.gpu
    assert card["driver"] == section.key.driver
    assert dict(section.key.libraries).items() <= card.items()
    assert card["timing protocol"] == section.key.protocol
    assert card["measured"] == "2026-11-21 09:00 UTC"
    failed = sum(row.status is not Status.OK for row in section.table.measurements)
    assert failed > 0
    assert card["measurements"].endswith(f" ok, {failed} failed")


def test_the_cost_sentence_names_the_worst_batch(section: Section) -> None:
    question = section.questions[0]

    assert question.default_cost is not None
    assert question.default_cost.worst_batch in cost_sentence(question, "a baseline")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv_layout": "fp3"}, StoreCorrupt, "fp3"),
        ({"heads": 0}, StoreCorrupt, "0 local heads"),
        ({"model": "gpt-2"}, UnknownName, "gpt-2"),
    ],
)
def test_a_key_that_cannot_be_is_named(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    table = real_table(points=("indexer_layout",))

    with pytest.raises(error, match=words):
        build([replace(table, key=replace(table.key, **change))])


def test_where_every_choice_is_forbidden_there_is_no_question() -> None:
    limited = toy_point(1000)
    pairs = [Batch.extend([0, 0], [new, new]) for new in (512, 1024, 2048)]
    point = replace(limited, grid=lambda setting: [*limited.grid(setting), *pairs])
    table = toy_table(point)
    guards = limited.arms[0].guards
    strict = replace(point, arms=tuple(replace(arm, guards=guards) for arm in point.arms))

    (before,) = build([table], points={"toy": point}).sections[0].questions
    (after,) = build([table], points={"toy": strict}).sections[0].questions

    assert [line.slice.label for line in before.lines] == ["prefix 0", "2 sequences, prefix 0"]
    assert [line.slice.label for line in after.lines] == ["prefix 0"]
    placed = map_rows(map_cells({cell.batch: cell for cell in after.cells}, after.lines))
    assert max(row["x"] for row in placed) == 512
