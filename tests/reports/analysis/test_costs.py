"""Cells, and what the engine's baseline costs over them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from nsa_tune.backend.baselines import Baseline, Default
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.records import Table
from nsa_tune.reports.analysis.costs import worst_first
from nsa_tune.reports.analysis.report import QuestionReport, build
from tests.reports.synthetic import FLAT, STEEP, real_table, toy_point, toy_table

ALWAYS_STEEP = Baseline(
    "a made-up engine", {"toy_path": Default(lambda setting: "steep", "engine.py:1")}
)


def _question(limit: int | None = None, baseline: Baseline = ALWAYS_STEEP) -> QuestionReport:
    point = toy_point(limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nsa_tune.reports.analysis.report.DEFAULT_BASELINE", baseline)
        return build([toy_table(point)], points={"toy": point}).sections[0].questions[0]


def test_a_cell_has_each_choices_time_fastest_first() -> None:
    cells = {str(cell.batch): cell for cell in _question().cells}

    cell = cells["extend:0+1024"]
    assert list(cell.times) == ["flat", "steep"]
    assert cell.best == cell.choice == "flat"
    assert cell.default == "steep"
    assert cell.times["steep"].latency_us == STEEP(Batch.extend([0], [1024]))
    assert cell.margin == pytest.approx(1034 / 202.4)
    assert cell.cost("flat") == 1
    assert cell.cost("steep") == cell.margin


def test_a_forbidden_choice_has_a_reason_and_no_cost() -> None:
    cells = {str(cell.batch): cell for cell in _question(limit=1000).cells}

    cell = cells["extend:0+1024"]
    assert cell.forbidden == {"steep": "steep ends at 1000 tokens"}
    assert cell.cost("steep") is None
    assert cell.margin is None
    assert cell.verdict == "only"


def test_the_default_costs_its_time_over_the_best() -> None:
    cost = _question().default_cost

    batches = [Batch.extend([0], [2**k]) for k in range(13)]
    ratios = [STEEP(batch) / min(STEEP(batch), FLAT(batch)) for batch in batches]
    assert cost is not None
    assert cost.batches == 13
    assert cost.geomean == pytest.approx(prod(ratios) ** (1 / 13))
    assert cost.worst == pytest.approx(ratios[-1])
    assert cost.worst_batch == "extend:0+4096"
    assert cost.unmeasured == 0


def test_the_table_costs_nothing_on_what_it_was_made_from() -> None:
    cost = _question().tuned_cost

    assert cost is not None
    assert cost.worst == 1


def test_the_worst_batches_come_first_and_free_ones_not_at_all() -> None:
    worst = worst_first(_question().cells)

    costs = [cost for _, cost in worst]
    assert costs == sorted(costs, reverse=True)
    assert [str(cell.batch) for cell, _ in worst][:2] == ["extend:0+4096", "extend:0+2048"]
    assert all(cost > 1 for cost in costs)
    assert len(worst) == 6  # 128 to 4096 new tokens: below 100 steep is the best


def test_a_default_that_was_not_measured_has_no_cost() -> None:
    unknown = Baseline(
        "a made-up engine", {"toy_path": Default(lambda setting: "other", "engine.py:1")}
    )

    question = _question(baseline=unknown)

    assert question.default_cost is None
    assert worst_first(question.cells) == []


def test_cells_come_in_the_order_of_their_lengths() -> None:
    news = [cell.batch.q_tokens for cell in _question().cells]

    assert news == sorted(news)


def test_a_table_without_measurements_has_no_questions() -> None:
    point = toy_point()
    table = toy_table(point)
    empty = Table(table.key, table.device, (), table.source)

    assert build([empty], points={"toy": point}).sections[0].questions == ()


def test_a_kernel_of_other_devices_is_no_limit_of_a_cell() -> None:
    (point,) = build([real_table(points=("prefill",))]).sections[0].points
    (path, kernel, sparse) = point.questions

    here = {one.name.partition("/")[2] for one in point.policy.candidates}
    assert {choice for cell in kernel.cells for choice in cell.forbidden} <= here
    assert {choice for cell in sparse.cells for choice in cell.forbidden} <= here
    assert {choice for cell in path.cells for choice in cell.forbidden} == {"mha"}


def test_a_cell_s_times_have_a_layer_s_share_of_the_pass() -> None:
    point = toy_point(None)
    table = toy_table(point)
    rows = tuple(replace(row, pass_us=6100.0) for row in table.measurements)
    shared = build([replace(table, measurements=rows)], points={"toy": point})

    plain = {cell.word: cell for cell in _question().cells}
    for cell in shared.sections[0].questions[0].cells:
        for choice, time in cell.times.items():
            assert time.latency_us == pytest.approx(plain[cell.word].times[choice].latency_us + 100)
