"""Steps of a layer: the chosen arms' times, their limits, and what a table does not know."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from nsa_tune.backend.baselines import SGLANG_0_5_23
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Question, Setting
from nsa_tune.backend.types.records import Measurement
from nsa_tune.reports.analysis.ceilings import ceilings_of
from nsa_tune.reports.analysis.layer_steps import (
    LayerSteps,
    Step,
    layer_steps,
    typical_batches,
)
from nsa_tune.reports.analysis.report import Report, build
from nsa_tune.reports.analysis.work import work_of
from nsa_tune.reports.formats.display_tables import layer_table
from tests.reports.synthetic import CEILINGS, real_table

LONG = Batch.extend([30000], [1000])
TABLE = real_table(ceilings=True)


def steps_of(batch: Batch, taken: dict[str, str], *, sharing: float | None = None) -> LayerSteps:
    """The steps of `batch` on the made-up table, with the choices `taken` by question.

    With `sharing`, mla/flashmla_kv takes so much once a pass.
    """

    def row(one: Measurement) -> Measurement:
        return replace(one, pass_us=sharing) if one.arm == "mla/flashmla_kv" else one

    setting = Setting.of(TABLE)
    names = ("indexer_metadata", "indexer_prefill", "indexer_topk", "indexer_layout", "prefill")
    rows = [row(one) for one in TABLE.measurements]
    policies = {name: Policy.fit(POINTS[name], setting, rows) for name in names}

    def choose(policy: Policy, question: Question) -> str | None:
        del policy
        return taken.get(question.name)

    return layer_steps(
        batch, policies, setting, SGLANG_0_5_23, choose, ceilings_of(TABLE.measurements)
    )


def step(found: LayerSteps, name: str) -> Step:
    return next(one for one in found.steps if one.name == name)


@pytest.fixture(scope="module")
def sparse() -> LayerSteps:
    return steps_of(LONG, {"prefill_path": "mla", "sparse_prefill": "flashmla_sparse"})


def test_steps_come_in_the_order_of_a_layer(sparse: LayerSteps) -> None:
    assert [one.name for one in sparse.steps] == [
        "indexer schedule", "indexer logits", "top-k", "attention",
    ]  # fmt: skip
    assert sparse.layers == 61


def test_a_step_takes_what_is_chosen_and_names_the_other_ways(sparse: LayerSteps) -> None:
    attention = step(sparse, "attention")

    assert attention.arm == "mla/flashmla_sparse"
    assert attention.latency_us == attention.ways_us["mla/flashmla_sparse"]
    assert set(attention.ways_us) == {"mla/flashmla_sparse", "mla/flashmla_kv"}
    assert list(attention.ways_us.values()) == sorted(attention.ways_us.values())
    assert (attention.default, attention.default_us) == (
        "mla/flashmla_kv", attention.ways_us["mla/flashmla_kv"],
    )  # fmt: skip


def test_a_limit_is_the_work_over_the_measured_ceilings(sparse: LayerSteps) -> None:
    work = work_of("prefill", "mla/flashmla_sparse", LONG, Setting.of(TABLE))
    assert work is not None
    least = 1e6 * max(work.moved / 3e12, work.flops / 600e12)

    attention = step(sparse, "attention")
    assert attention.least_us == pytest.approx(least)
    assert attention.bound == ("compute" if work.flops / 600e12 > work.moved / 3e12 else "memory")
    assert {row.point for row in CEILINGS} == {"roofline"}


def test_a_step_without_times_says_so_and_is_not_counted(sparse: LayerSteps) -> None:
    topk = step(sparse, "top-k")

    assert topk.latency_us is None
    assert "the table has no times of indexer_topk" in topk.note
    assert topk in sparse.untimed
    assert sparse.total_us == step(sparse, "attention").latency_us
    assert "Not counted: indexer schedule, indexer logits, top-k." in layer_table(sparse, "X").note


def test_what_is_not_scored_takes_no_time() -> None:
    found = steps_of(Batch.extend([1000], [500]), {"prefill_path": "mha", "mha_kernel": "fa3"})

    assert step(found, "attention").arm == "mha/fa3"
    for name in ("indexer logits", "top-k"):
        assert step(found, name).latency_us == 0
        assert step(found, name).note.startswith("skipped: 1500 kv tokens are all selected")


def test_the_share_of_a_pass_is_in_the_time_and_named() -> None:
    taken = {"prefill_path": "mla", "sparse_prefill": "flashmla_kv"}
    without, shared = (steps_of(LONG, taken, sharing=cost) for cost in (None, 610.0))

    one, other = (step(found, "attention") for found in (without, shared))
    assert one.latency_us is not None and other.latency_us is not None
    assert other.latency_us - one.latency_us == pytest.approx(10.0, rel=0.05)
    assert one.pass_us is None
    assert other.pass_us == pytest.approx(610.0)


def test_what_a_pass_computes_once_is_divided_by_its_layers() -> None:
    setting = Setting.of(TABLE)
    point = POINTS["indexer_metadata"]
    rows = [
        replace(TABLE.measurements[-1], point=point.name, batch=str(batch), arm=arm,
                latency_us=us, low_us=us, high_us=us)
        for batch in point.grid(setting)
        for arm, us in (("triton", 6.1), ("deep_gemm", 12.2))
    ]  # fmt: skip
    policies = {point.name: Policy.fit(point, setting, rows)}

    found = layer_steps(
        LONG, policies, setting, SGLANG_0_5_23, lambda *_: "triton", ceilings_of(CEILINGS)
    )

    (one,) = found.steps
    assert one.latency_us == pytest.approx(0.1, rel=0.01)
    assert one.pass_us == pytest.approx(6.1, rel=0.01)
    assert one.next_best_us == pytest.approx(0.2, rel=0.01)
    assert found.next_best_us == one.next_best_us


def test_an_unmeasured_choice_has_no_time_beside_those_that_have() -> None:
    found = steps_of(LONG, {"prefill_path": "mla", "sparse_prefill": "fa3"})

    attention = step(found, "attention")
    assert attention.latency_us is None
    assert "too little is measured of mla, fa3" in attention.note
    assert len(attention.ways_us) == 2


def test_a_step_with_one_way_says_that_it_is_not_timed() -> None:
    found = steps_of(Batch.decode([9000] * 4), {"indexer_layout": "native"})

    assert "native/deep_gemm is the only way here" in step(found, "indexer logits").note


def test_a_mode_without_a_point_has_no_steps() -> None:
    found = layer_steps(
        Batch.decode([9]), {}, Setting.of(TABLE), SGLANG_0_5_23, lambda *_: None, None
    )

    assert (found.steps, found.total_us, found.default_us) == ((), 0, 0)
    assert "No decision point" in layer_table(found, "X").note


def test_the_arms_left_are_those_of_every_taken_choice() -> None:
    taken = {"prefill_path": "mla", "mha_kernel": "fa3", "sparse_prefill": "flashmla_kv"}
    left = POINTS["prefill"].arms_taken(lambda question: taken.get(question.name))

    assert left == {"mla/flashmla_kv"}


# --- in reports


@pytest.fixture(scope="module")
def report() -> Report:
    return build([TABLE])


def test_a_report_shows_chunks_and_steps_within_what_was_measured(report: Report) -> None:
    (section,) = report.sections
    words = [layer.batch for layer in section.layers]

    assert words[:3] == ["extend:0+8192", "extend:24576+8192", "extend:57344+8192"]
    assert "target_verify:n2:8192x32" in words
    for layer in section.layers:
        assert layer.total_us > 0
        assert all(not one.note.startswith("outside") for one in layer.steps)


def test_a_report_takes_what_the_table_decides(report: Report) -> None:
    (section,) = report.sections
    policy = next(one.policy for one in section.points if one.point.name == "prefill")
    layer = section.layers[1]
    estimates = policy.estimates(Batch.parse(layer.batch))

    attention = step(layer, "attention")
    assert attention.latency_us == pytest.approx(
        min(estimates[arm].latency_us for arm in attention.ways_us)
    )


def test_nothing_measured_makes_no_batches() -> None:
    assert list(typical_batches({})) == []
    empty = partial(Policy.fit, POINTS["prefill"], Setting.of(TABLE), ())
    assert list(typical_batches({"prefill": empty()})) == []
