"""The dispatcher: answers from a table, or by the engine's baseline, eagerly and under capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune import Batch, BatchError, Dispatcher, UnknownName
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch import opening
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Point, Question, Setting
from nsa_tune.backend.types.records import Key, Measurement, Status, Table
from tests.backend.fake_point import (
    FAKE,
    FEATURES,
    SETTING,
    Times,
    linear,
    policy_of,
    table_of,
)
from tests.backend.machine import TIMES, opened, written

_COLD, _WARM = Batch.extend([0], [64]), Batch.extend([1024], [8])


pytestmark = pytest.mark.usefixtures("machine")


def _made(times: Times = TIMES) -> Dispatcher:
    return Dispatcher(SETTING, [policy_of(times)], source="made up")


# --- planning


def test_a_plan_holds_each_choice_and_what_follows() -> None:
    plan = _made().plan(Batch.extend([1920], [8]))

    assert (plan.prefill_path, plan.sparse_prefill) == ("mla", "packed")
    assert (plan.mha_kernel, plan.indexer_layout) == (None, None)
    assert (plan.topk_transform, plan.dequantize_prefix, plan.skip_topk) == ("paged", False, True)


def test_reasons_carry_verdict_source_estimates_and_limits() -> None:
    reason = _made().plan(Batch.extend([1024], [8])).reasons["prefill_path"]

    assert reason.verdict is Verdict.WIN
    assert reason.source == "made up"
    assert reason.estimates_us["mha"] == pytest.approx(TIMES["mha/dense"](_WARM))
    assert reason.estimates_us["mla"] == pytest.approx(TIMES["mla/packed"](_WARM))
    low, high = reason.intervals_us["mla"]
    assert low < reason.estimates_us["mla"] < high
    assert reason.guards == {}
    assert "mla (22 us) is faster than mha (212 us) by 9.65x" in reason.text


def test_the_sparse_kernel_is_answered_when_mha_won_too() -> None:
    plan = _made().plan(_COLD)

    assert plan.prefill_path == "mha"
    assert plan.sparse_prefill == "wide"


def test_a_captured_prefill_takes_mla() -> None:
    plan = _made().plan(Batch.extend([0], [64], captured=True))

    assert plan.prefill_path == "mla"
    assert plan.reasons["prefill_path"].guards == {"mha": "not under capture"}


def test_decoding_carries_no_prefill_choice() -> None:
    plan = _made().plan(Batch.decode([99]))

    assert (plan.prefill_path, plan.mha_kernel, plan.sparse_prefill) == (None, None, None)
    assert (plan.dequantize_prefix, plan.topk_transform, plan.skip_topk) == (None, "paged", False)
    assert set(plan.reasons) == {"topk_transform", "skip_topk", "layout_conversion"}


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 9000)), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=100)
def test_a_plan_says_what_its_reasons_decide(lens: list[tuple[int, int]], captured: bool) -> None:
    batch = Batch.extend([p for p, _ in lens], [n for _, n in lens], captured=captured)

    plan = _MADE.plan(batch)

    for name in ("prefill_path", "sparse_prefill"):
        assert getattr(plan, name) == _MADE.decide(batch, name).choice


_MADE = _made()


def test_sums_and_lengths_give_the_same_plan() -> None:
    whole = Batch.extend([100, 100], [28, 28])
    sums = Batch.from_totals(mode="extend", batch_size=2, q_tokens=56, kv_tokens=256, max_kv=128)

    ours, theirs = _made().plan(whole), _made().plan(sums)

    assert replace(ours, batch=sums) == theirs


def test_a_batch_of_sums_that_was_planned_before_gets_the_same_plan() -> None:
    made = _made()
    for i in range(3000):
        made.plan(Batch.from_totals(mode="extend", q_tokens=1 + i, kv_tokens=4000, max_kv=4000))
    first = made.plan(Batch.from_totals(mode="extend", q_tokens=9, kv_tokens=99, max_kv=99))
    again = made.plan(Batch.from_totals(mode="extend", q_tokens=9, kv_tokens=99, max_kv=99))

    assert again == first
    assert again == _made().plan(again.batch)


def test_a_point_that_breaks_on_a_batch_means_the_baseline() -> None:
    breaks = FEATURES._replace(
        names=("odd",), features=lambda batch: (1 / (batch.q_tokens - 77),)
    )  # fmt: skip
    fragile = replace(FAKE, features=lambda setting: breaks)
    policy = Policy.fit(fragile, SETTING, table_of(TIMES).measurements)
    plan = Dispatcher(SETTING, [policy], source="made up").plan(Batch.extend([1024], [77]))

    assert plan.prefill_path == "mha"
    assert plan.reasons["prefill_path"].verdict is Verdict.BASELINE
    assert plan.reasons["prefill_path"].source.startswith("SGLang 0.5.23 layers/attention/")


def test_an_unknown_question_is_refused() -> None:
    with pytest.raises(UnknownName, match="question in extend 'shape'; use one of: prefill_path"):
        _made().decide(_WARM, "shape")


def test_the_explanation_is_of_the_plan_and_its_source() -> None:
    text = _made().explain(Batch.extend([2048], [64]))

    assert "source  made up" in text
    assert "prefill_path = mla  (only)" in text


# --- captured sizes


LAYOUTS = replace(
    FAKE,
    name="layouts",
    modes=frozenset({Mode.DECODE, Mode.TARGET_VERIFY}),
    questions=(Question("indexer_layout", {"native": ("mla/wide",), "flatten": ("mla/packed",)}),),
    features=lambda setting: FEATURES._replace(regime=lambda batch: batch.next_n),
)


CONTEXTS = (1024, 4096, 16384, 65536)


def _decoder(
    wide: Callable[[Batch], float], packed: Callable[[Batch], float],
    point: Point = LAYOUTS, contexts: Sequence[int] = CONTEXTS,
) -> Dispatcher:  # fmt: skip
    rows = []
    for sequences in (1, 4, 16, 64):
        for context in contexts:
            batch = Batch.verify([context] * sequences, 2)
            for arm, time in (("mla/wide", wide), ("mla/packed", packed)):
                us = time(batch)
                rows.append(
                    Measurement("layouts", str(batch), arm, Status.OK, us, us, us, samples=9)
                )
    return Dispatcher(SETTING, [Policy.fit(point, SETTING, rows)], source="made up")


def test_a_captured_size_gets_one_choice_by_mean_regret() -> None:
    # native is a little slower up to 4096 and far faster beyond.
    made = _decoder(linear(0, 0.0001, 2), linear(0, 0.001, 0.5))

    assert made.plan(Batch.verify([1024], 2)).indexer_layout == "flatten"
    plan = made.captured(1, next_n=2)
    assert plan.indexer_layout == "native"
    assert plan.batch.captured
    assert plan.reasons["indexer_layout"].verdict in {Verdict.WIN, Verdict.UNSURE}
    assert plan.reasons["topk_transform"].verdict is Verdict.FORCED
    assert (plan.prefill_path, plan.sparse_prefill, plan.mha_kernel) == (None, None, None)


def test_contexts_where_too_little_is_measured_do_not_count_for_a_captured_size() -> None:
    by_length = FEATURES._replace(regime=lambda batch: 1 if batch.max_kv > 2048 else 0)
    point = replace(LAYOUTS, features=lambda setting: by_length)
    native, flatten = linear(0, 0.0001, 2), linear(0, 0.001, 9)
    made = _decoder(native, flatten, point, contexts=(4096, 16384, 65536))

    assert made.plan(Batch.verify([1024], 2)).indexer_layout == "flatten", "SGLang's baseline"
    plan = made.captured(1, next_n=2, contexts={1024: 9, 16384: 1})
    assert plan.indexer_layout == "native"
    assert plan.reasons["indexer_layout"].verdict is Verdict.WIN


def test_a_captured_size_is_decided_once() -> None:
    made = _decoder(linear(0, 0.0001, 2), linear(0, 0.001, 0.5))

    assert made.captured(8, next_n=2) is made.captured(8, next_n=2)


def test_a_captured_size_stays_in_the_measured_range() -> None:
    made = _decoder(linear(0, 0.0001, 2), linear(0, 0.001, 0.5))

    assert made.captured(64, next_n=2).batch.max_kv == 65536
    assert made.captured(640, next_n=2).batch.max_kv == 6553
    assert made.captured(10**6, next_n=2).batch.max_kv == 4


def test_a_captured_size_without_measurements_gets_the_baseline() -> None:
    policy = Policy.fit(LAYOUTS, SETTING, ())
    plan = Dispatcher(SETTING, [policy], source="made up").captured(64, next_n=2)

    assert plan.indexer_layout == "flatten"
    assert plan.reasons["indexer_layout"].verdict is Verdict.BASELINE


def test_the_mode_of_a_captured_size_follows_next_n_unless_given() -> None:
    made = _decoder(linear(0, 0.0001, 2), linear(0, 0.001, 0.5))

    assert made.captured(4).batch.mode is Mode.DECODE
    assert made.captured(4, 2).batch.mode is Mode.TARGET_VERIFY
    assert made.captured(4, 2, mode="draft_extend").batch.mode is Mode.DRAFT_EXTEND


@pytest.mark.parametrize(
    ("size", "next_n", "mode"), [(0, 1, None), (-1, 2, None), (4, 0, None), (4, 1, "extend"),
                                 (4, 1, "prefill")],
)  # fmt: skip
def test_a_size_that_no_graph_has_is_refused(size: int, next_n: int, mode: str | None) -> None:
    made = _decoder(linear(0, 0.0001, 2), linear(0, 0.001, 0.5))

    with pytest.raises(BatchError):
        made.captured(size, next_n, mode)


# --- the real points, without a table

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def real_points(machine: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Point]:
    """On the machine of tests, which has a made-up one otherwise."""
    monkeypatch.setattr(opening, "POINTS", POINTS)
    return POINTS


@pytest.mark.usefixtures("real_points")
@pytest.mark.parametrize("gpu", [H100, "NVIDIA H200", "NVIDIA B200", "Unheard-of GPU"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_without_a_table_every_mode_gets_the_baseline_within_the_guards(
    gpu: str, kv_dtype: str
) -> None:
    found = opened(gpu=gpu, kv_dtype=kv_dtype)
    random = Random(5)
    batches = [point.sample(found.setting, random) for point in POINTS.values() for _ in range(20)]

    for batch in [*batches, Batch.decode([5000] * 8), Batch.extend([0], [100], captured=True)]:
        plan = found.plan(batch)
        for name in found.questions(batch.mode):
            choice = found.decide(batch, name)
            assert getattr(plan, name) == choice.choice
            assert choice.verdict in {Verdict.BASELINE, Verdict.ONLY, Verdict.NONE}
        assert found.explain(batch)
    assert found.captured(64, 2).prefill_path is None


@pytest.mark.usefixtures("real_points")
def test_without_a_table_hopper_gets_sglangs_baseline() -> None:
    found = opened(gpu=H100, kv_dtype="bf16")

    assert found.plan(Batch.extend([1920], [128])).prefill_path == "mha"
    assert found.plan(Batch.extend([4096], [128])).prefill_path == "mla"
    assert found.plan(Batch.extend([0], [128], captured=True)).prefill_path == "mla"
    assert found.plan(Batch.extend([4096], [128])).sparse_prefill == "flashmla_sparse"
    assert found.plan(Batch.verify([8192], 2)).indexer_layout == "flatten"


@pytest.mark.usefixtures("real_points")
def test_an_unknown_build_of_flashmla_never_gets_its_decode_kernel_for_prefill() -> None:
    plan = opened(gpu=H100).plan(Batch.extend([4096], [128]))

    assert plan.sparse_prefill == "flashmla_sparse"
    assert "schedule limit is unknown" in plan.reasons["sparse_prefill"].guards["flashmla_kv"]


@pytest.mark.usefixtures("real_points")
def test_a_table_of_the_real_points_is_read_back_into_plans(tmp_path: Path) -> None:
    libraries = (("sgl-flash-mla", "1.0.0"), ("torch", "2.0"))
    key = Key(H100, "1.0", libraries, "deepseek-v3.2", 128, "fp8_packed", "made up 1")
    setting = Setting(
        SETTING.profile, 128, KVLayout.FP8_PACKED, detect.KNOWN[H100], dict(libraries)
    )
    rows = []
    for point in POINTS.values():
        for batch in point.grid(setting):
            for i, arm in enumerate(point.candidates(setting)):
                if arm.allowed(batch, setting) is None:
                    us = 100.0 * (30 - i)
                    rows.append(
                        Measurement(point.name, str(batch), arm.name, Status.OK, us, us, us)
                    )
    table = Table(key, detect.KNOWN[H100], tuple(rows), "made up", "2025-01-01T00:00:00Z")
    found = opened(written(tmp_path / "t.tsv", table), gpu=H100)

    batch = Batch.extend([1920], [128])
    plan = found.plan(batch)
    arms = POINTS["prefill"].candidates(setting)
    *_, last = [arm.name for arm in arms if arm.allowed(batch, setting) is None]
    assert plan.reasons["prefill_path"].verdict is Verdict.WIN
    assert plan.prefill_path == last.partition("/")[0]
    assert plan.sparse_prefill == last.partition("/")[2]
    assert found.plan(Batch.verify([8192] * 4, 2)).reasons["indexer_layout"].estimates_us


@pytest.mark.usefixtures("real_points")
def test_a_lossy_arm_is_taken_only_by_who_allows_it(tmp_path: Path) -> None:
    libraries = (("sgl-flash-mla", "1.0.0"), ("torch", "2.0"))
    key = Key(H100, "1.0", libraries, "deepseek-v3.2", 128, "fp8_packed", "made up 1")
    times = {"mla/flashmla_sparse": 20.0, "mla/flashmla_kv": 30.0, "mla/flashmla_sparse_q8": 10.0}
    rows = [
        Measurement("prefill", str(batch), arm, Status.OK, us, us, us)
        for batch in POINTS["prefill"].grid(SETTING)
        for arm, each in times.items()
        for us in (each * batch.q_tokens,)
    ]
    table = Table(key, detect.KNOWN[H100], tuple(rows), "made up", "2025-01-01T00:00:00Z")
    path, batch = written(tmp_path / "t.tsv", table), Batch.extend([8192], [128])

    plain = opened(path, gpu=H100)
    asked = opened(path, gpu=H100, allow_lossy=["flashmla_sparse_q8"])

    assert plain.plan(batch).sparse_prefill == "flashmla_sparse"
    assert "flashmla_sparse_q8" not in plain.plan(batch).reasons["sparse_prefill"].estimates_us
    assert "mla/flashmla_sparse_q8" not in plain.unmeasured.get("prefill", ())
    plan = asked.plan(batch)
    assert plan.sparse_prefill == "flashmla_sparse_q8"
    assert (plan.topk_transform, plan.layout_conversion) == ("ragged", "packed_fp8.narrow")
    assert "layout_conversion = packed_fp8.narrow" in asked.explain(batch)
    with pytest.raises(UnknownName, match="unknown lossy arm 'fast'"):
        opened(path, gpu=H100, allow_lossy=["fast"])


@pytest.mark.usefixtures("real_points")
def test_no_variable_forces_a_lossy_arm_that_was_not_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_TUNE_FORCE", "prefill=mla/flashmla_sparse_q8")
    batch = Batch.extend([8192], [128])

    for allowed in ([], ["flashmla_sparse_q8"]):
        found = Dispatcher.open(
            gpu=H100, model="deepseek-v3.2", heads=128, kv_dtype="fp8", allow_lossy=allowed
        )
        assert (found.plan(batch).sparse_prefill == "flashmla_sparse_q8") == bool(allowed)
