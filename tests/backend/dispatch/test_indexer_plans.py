"""Plans of the indexer's own questions: scoring in prefill, and the selection."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend import points
from nsa_tune.backend.baselines import SGLANG_0_5_23, VLLM_0_33_0, Baseline
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.dispatch.table_planner import Match, TablePlanner
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Status

H200 = Setting(profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, KNOWN["NVIDIA H200"])
POINTS = [points.POINTS["indexer_prefill"], points.POINTS["indexer_topk"]]
BATCHES = [
    Batch.extend([4096], [1000]),
    Batch.extend([32768, 7], [8192, 100]),
    Batch.extend([1000], [1000]),
    Batch.extend([0], [110000]),
    Batch.decode([9000] * 30),
    Batch.decode([100]),
    Batch.verify([5000, 100], 2),
]


def rows(point: Point) -> Iterator[Measurement]:
    """Made-up times: of few scores `sglang` and `paged` are the fastest, of many they are not."""
    constant = {"sglang": 5.0, "sampled": 10.0, "flashinfer": 20.0, "paged": 5.0, "ragged": 10.0}
    slope = {"sglang": 1.5, "paged": 1.5}
    for batch in point.grid(H200):
        for arm in point.candidates(H200):
            if arm.allowed(batch, H200) is None:
                us = constant.get(arm.name, 12.0) + slope.get(arm.name, 1.0) * batch.pairs / 1e6
                yield Measurement(point.name, str(batch), arm.name, Status.OK, us, us, us, 9)


def planner(baseline: Baseline, *, measured: bool) -> TablePlanner:
    policies = [Policy.fit(one, H200, rows(one) if measured else ()) for one in POINTS]
    match = Match.EXACT if measured else Match.BASELINE
    return TablePlanner(H200, policies, source="made up", match=match, baseline=baseline)


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("baseline", [SGLANG_0_5_23, VLLM_0_33_0], ids=lambda one: one.name)
def test_a_plan_takes_what_decide_says(baseline: Baseline, measured: bool) -> None:
    by, random = planner(baseline, measured=measured), Random(3)
    drawn = [point.sample(H200, random) for point in POINTS for _ in range(40)]

    for batch in (*BATCHES, *drawn, *(one.sums for one in drawn)):
        plan = by.plan(batch)
        for name in by.questions(batch.mode):
            assert getattr(plan, name) == by.decide(batch, name).choice


def test_measurements_decide_by_size_and_guards_before_them() -> None:
    plans = [planner(SGLANG_0_5_23, measured=True).plan(batch) for batch in BATCHES]

    assert [plan.indexer_prefill for plan in plans] == [
        "paged", "ragged", None, "chunked", None, None, None,
    ]  # fmt: skip
    assert [plan.indexer_topk for plan in plans] == [
        "sglang", "sampled", None, None, "sglang", None, "sglang",
    ]  # fmt: skip
    assert [plan.skip_topk for plan in plans[:4]] == [False, False, True, False]


def test_without_measurements_the_baseline_answers() -> None:
    sglang, vllm = (planner(one, measured=False) for one in (SGLANG_0_5_23, VLLM_0_33_0))

    plan = sglang.plan(BATCHES[1])
    assert (plan.indexer_prefill, plan.indexer_topk) == ("ragged", "sglang")
    plan = vllm.plan(BATCHES[1])
    assert (plan.indexer_prefill, plan.indexer_topk) == ("chunked", "vllm")
    # Ragged logits would pass a quarter of the memory.
    choice = sglang.decide(BATCHES[3], "indexer_prefill")
    assert (choice.choice, choice.verdict) == ("chunked", Verdict.ONLY)
    assert "GiB of logits" in choice.forbidden["ragged"]
    assert sglang.plan(BATCHES[2]).indexer_topk is None


def test_a_captured_graph_selects_at_every_context() -> None:
    by = planner(SGLANG_0_5_23, measured=True)
    plan = by.captured_plan(BATCHES[4].mode, 30, 1, None)

    assert plan.indexer_topk is not None
    for context in (10, 2048, 2049, 60000):
        batch = Batch.decode([context] * 30, captured=True)
        assert by.replayed(plan, batch).indexer_topk == plan.indexer_topk


@pytest.mark.usefixtures("clean_environment")
def test_a_table_without_these_points_is_harmless() -> None:
    found = Dispatcher.open(gpu="NVIDIA H200", model="deepseek-v3.2", heads=64, kv_dtype="bf16")

    assert found.unmeasured["indexer_topk"] == ("sglang", "sampled", "flashinfer", "sglang_v2")
    assert found.unmeasured["indexer_prefill"] == ("ragged", "paged", "chunked")
    plan = found.plan(BATCHES[1])
    assert (plan.indexer_prefill, plan.indexer_topk) == ("ragged", "sglang")
    assert plan.reasons["indexer_topk"].verdict is Verdict.BASELINE
    assert "indexer_topk sglang" in found.explain(BATCHES[1])
    assert found.captured(8).indexer_topk == "sglang"


@pytest.mark.usefixtures("clean_environment")
def test_few_new_tokens_behind_a_long_prefix_are_scored_where_the_keys_lie() -> None:
    found = Dispatcher.open(gpu="NVIDIA H200", model="deepseek-v3.2", heads=128, kv_dtype="fp8")

    assert found.plan(Batch.extend([122880], [8])).indexer_prefill == "paged"
    assert found.plan(Batch.extend([0], [8192])).indexer_prefill == "ragged"
