"""The dispatcher: opens what fits, answers from it, and goes on by the engine's rule."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune import Batch, BatchError, Dispatcher, NoTunedData, UnknownName, UsageError
from nsa_tune.backend import detect, nvml, opening, tables
from nsa_tune.backend.batch import Mode
from nsa_tune.backend.layouts import KVLayout
from nsa_tune.backend.point import Answer, Point, Setting
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.policy import Policy
from nsa_tune.backend.records import Key, Measurement, Status, Table
from nsa_tune.backend.text_table import format_table
from nsa_tune.backend.verdict import Verdict
from tests.backend.fake_point import (
    DEVICE,
    FAKE,
    KEY,
    SETTING,
    Times,
    linear,
    policy_of,
    table_of,
)

TIMES: Times = {
    "mha/dense": linear(0.1, 0.2, 5),
    "mla/wide": linear(0.4, 0.01, 12),
    "mla/packed": linear(0.5, 0, 18),
}
_COLD, _WARM = Batch.extend([0], [64]), Batch.extend([1024], [8])


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with the made-up GPU, the made-up point only, and no table anywhere."""
    monkeypatch.delenv("NSA_TUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "site"))
    monkeypatch.setattr(tables, "_SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(nvml, "gpu_names", lambda: ("Test GPU",))
    monkeypatch.setitem(detect.KNOWN, "Test GPU", DEVICE)
    monkeypatch.setattr(detect, "driver_version", lambda: "1.0")
    monkeypatch.setattr(detect, "library_versions", lambda: (("torch", "2.0"),))
    monkeypatch.setattr(opening, "POINTS", {FAKE.name: FAKE})


def _write(path: Path, table: Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_table(table))
    return path


def _open(db: Path | None = None, **changes: Any) -> Dispatcher:
    asked: dict[str, Any] = {
        "gpu": "Test GPU", "model": "deepseek-v3.2", "heads": 128, "kv_dtype": "fp8"
    }  # fmt: skip
    return Dispatcher.open(db, **{**asked, **changes})


def _made(times: Times = TIMES) -> Dispatcher:
    return Dispatcher(SETTING, [policy_of(times)], source="made up")


# --- opening


def test_a_table_answers(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.tsv", table_of(TIMES))

    opened = _open(path)

    assert opened.plan(_COLD).prefill_path == "mha"
    assert opened.plan(_WARM).prefill_path == "mla"
    assert opened.source == f"{path}, measured 2025-01-01T00:00:00Z"
    assert opened.table is not None
    assert opened.table.key == KEY


def test_no_gpu_means_this_machine(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.tsv", table_of(TIMES))

    assert _open(path, gpu=None).table is not None


def test_shipped_tables_answer_on_a_machine_without_that_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: ())
    _write(tmp_path / "shipped" / "test-gpu.tsv", table_of(TIMES))

    opened = _open()

    assert opened.plan(_WARM).prefill_path == "mla"
    assert opened.source.startswith("shipped:test-gpu")


@pytest.mark.parametrize("here", [True, False])
def test_of_several_tables_the_local_versions_win_where_the_gpu_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    other = replace(KEY, driver="2.0", libraries=(("torch", "2.1"),))
    _write(tmp_path / "shipped" / "ours.tsv", table_of(TIMES, KEY, "2025-01-01T00:00:00Z"))
    _write(tmp_path / "shipped" / "newer.tsv", table_of(TIMES, other, "2025-06-01T00:00:00Z"))
    monkeypatch.setattr(nvml, "gpu_names", lambda: ("Test GPU",) if here else ())

    assert _open().source.partition(",")[0] == ("shipped:ours" if here else "shipped:newer")


def test_the_source_says_in_what_the_table_differs_from_this_machine(tmp_path: Path) -> None:
    other = replace(KEY, driver="2.0", libraries=(("torch", "2.1"),))
    path = _write(tmp_path / "t.tsv", table_of(TIMES, other))

    source = _open(path).source

    assert "driver: measured with 2.0, here 1.0; torch: measured with 2.1, here 2.0" in source


@pytest.mark.parametrize(("here", "version"), [(True, "2.0"), (False, "2.1")])
def test_guards_are_given_the_versions_that_will_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool, version: str
) -> None:
    path = _write(tmp_path / "t.tsv", table_of(TIMES, replace(KEY, libraries=(("torch", "2.1"),))))
    monkeypatch.setattr(nvml, "gpu_names", lambda: ("Test GPU",) if here else ())

    assert _open(path).setting.libraries == {"torch": version}


@pytest.mark.parametrize(
    "change",
    [{"model": "gpt-2"}, {"heads": 48}, {"heads": 0}, {"kv_dtype": "int4"}],
    ids=str,
)
def test_a_request_that_cannot_be_is_a_usage_error(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        _open(**change)


def _missing(path: Path) -> None:
    del path


def _truncated(path: Path) -> None:
    text = format_table(table_of(TIMES))
    path.write_text(text[: len(text) // 2])


def _text(path: Path) -> None:
    path.write_text("not a table")


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE birds (name TEXT)")
    connection.close()


def _bad_batch(path: Path) -> None:
    table = table_of(TIMES)
    rows = (replace(table.measurements[0], batch="extend:0+0"), *table.measurements[1:])
    path.write_text(format_table(replace(table, measurements=rows)))


_DAMAGES = [
    (_missing, "t.tsv", "there is no"),
    (_missing, "t.db", "there is no"),
    (_truncated, "t.tsv", "cut short"),
    (_text, "t.tsv", "not a table of nsa-tune"),
    (_text, "t.db", "not an SQLite database"),
    (_foreign, "t.db", "not one of nsa-tune"),
    (_bad_batch, "t.tsv", "impossible batch"),
]


@pytest.mark.parametrize(("damage", "name", "clause"), _DAMAGES)
def test_an_unusable_table_means_the_rule_and_a_logged_reason(
    damage: Callable[[Path], None],
    name: str,
    clause: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / name
    damage(path)

    with caplog.at_level(logging.WARNING, "nsa_tune"):
        opened = _open(path)

    assert opened.table is None
    assert opened.plan(_WARM).prefill_path == "mha"
    assert opened.plan(_WARM).reasons["prefill_path"].verdict is Verdict.RULE
    assert str(path) in caplog.text
    assert clause in caplog.text
    assert str(path) in opened.source


@pytest.mark.parametrize(("damage", "name", "clause"), _DAMAGES)
def test_strict_refuses_an_unusable_table(
    damage: Callable[[Path], None], name: str, clause: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    damage(path)

    with pytest.raises(NoTunedData, match=clause) as caught:
        _open(path, strict=True)
    assert caught.value.exit_code == 3


def test_strict_names_the_fields_that_differ_from_the_nearest_table(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.tsv", table_of(TIMES))

    with pytest.raises(NoTunedData) as caught:
        _open(path, gpu="NVIDIA H200", heads=64, strict=True)

    assert str(caught.value) == (
        "nothing is tuned for deepseek-v3.2 with 64 local heads and KV layout fp8_packed on "
        f"'NVIDIA H200'; the nearest table, {path}, differs in gpu ('Test GPU' there), heads "
        "('128' there); measure with `nsa-tune run`"
    )


def test_a_table_that_cannot_be_compiled_gives_way_to_the_next(tmp_path: Path) -> None:
    _write(tmp_path / "shipped" / "good.tsv", table_of(TIMES, measured_at="2025-01-01T00:00:00Z"))
    bad = tmp_path / "shipped" / "newer.tsv"
    _bad_batch(bad)
    bad.write_text(bad.read_text().replace("2025-01-01", "2025-09-01"))

    assert _open().source.startswith("shipped:good")


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
    sums = Batch.from_totals(mode="extend", sequences=2, q_tokens=56, kv_tokens=256, max_kv=128)

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


def test_a_point_that_breaks_on_a_batch_means_the_rule() -> None:
    def breaks(batch: Batch, setting: Setting) -> tuple[float, ...]:
        return (1 / (batch.q_tokens - 77), 1.0)

    fragile = replace(FAKE, cost_terms=breaks)
    policy = Policy.compile(fragile, SETTING, table_of(TIMES).measurements)
    plan = Dispatcher(SETTING, [policy], source="made up").plan(Batch.extend([1024], [77]))

    assert plan.prefill_path == "mha"
    assert plan.reasons["prefill_path"].verdict is Verdict.RULE
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
    answers=(Answer("indexer_layout", {"native": ("mla/wide",), "flatten": ("mla/packed",)}),),
    sheet=lambda batch: batch.next_n,
)


def _decoder(wide: Callable[[Batch], float], packed: Callable[[Batch], float]) -> Dispatcher:
    rows = []
    for sequences in (1, 4, 16, 64):
        for context in (1024, 4096, 16384, 65536):
            batch = Batch.verify([context] * sequences, 2)
            for arm, time in (("mla/wide", wide), ("mla/packed", packed)):
                us = time(batch)
                rows.append(
                    Measurement("layouts", str(batch), arm, Status.OK, us, us, us, samples=9)
                )
    return Dispatcher(SETTING, [Policy.compile(LAYOUTS, SETTING, rows)], source="made up")


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


def test_a_captured_size_is_decided_once() -> None:
    made = _decoder(linear(0, 0.0001, 2), linear(0, 0.001, 0.5))

    assert made.captured(8, next_n=2) is made.captured(8, next_n=2)


def test_a_captured_size_stays_in_the_measured_range() -> None:
    made = _decoder(linear(0, 0.0001, 2), linear(0, 0.001, 0.5))

    assert made.captured(64, next_n=2).batch.max_kv == 65536
    assert made.captured(640, next_n=2).batch.max_kv == 6553
    assert made.captured(10**6, next_n=2).batch.max_kv == 4


def test_a_captured_size_without_measurements_gets_the_rule() -> None:
    policy = Policy.compile(LAYOUTS, SETTING, ())
    plan = Dispatcher(SETTING, [policy], source="made up").captured(64, next_n=2)

    assert plan.indexer_layout == "flatten"
    assert plan.reasons["indexer_layout"].verdict is Verdict.RULE


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
def real_points(monkeypatch: pytest.MonkeyPatch) -> dict[str, Point]:
    monkeypatch.setattr(opening, "POINTS", POINTS)
    return POINTS


@pytest.mark.usefixtures("real_points")
@pytest.mark.parametrize("gpu", [H100, "NVIDIA H200", "NVIDIA B200", "Unheard-of GPU"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_without_a_table_every_mode_gets_the_rule_within_the_guards(
    gpu: str, kv_dtype: str
) -> None:
    opened = _open(gpu=gpu, kv_dtype=kv_dtype)
    random = Random(5)
    batches = [point.sample(opened.setting, random) for point in POINTS.values() for _ in range(20)]

    for batch in [*batches, Batch.decode([5000] * 8), Batch.extend([0], [100], captured=True)]:
        plan = opened.plan(batch)
        for name in opened.questions(batch.mode):
            choice = opened.decide(batch, name)
            assert getattr(plan, name) == choice.choice
            assert choice.verdict in {Verdict.RULE, Verdict.ONLY, Verdict.NONE}
        assert opened.explain(batch)
    assert opened.captured(64, 2).prefill_path is None


@pytest.mark.usefixtures("real_points")
def test_without_a_table_hopper_gets_sglangs_rule() -> None:
    opened = _open(gpu=H100, kv_dtype="bf16")

    assert opened.plan(Batch.extend([1920], [128])).prefill_path == "mha"
    assert opened.plan(Batch.extend([4096], [128])).prefill_path == "mla"
    assert opened.plan(Batch.extend([0], [128], captured=True)).prefill_path == "mla"
    assert opened.plan(Batch.extend([4096], [128])).sparse_prefill == "flashmla_sparse"
    assert opened.plan(Batch.verify([8192], 2)).indexer_layout == "flatten"


@pytest.mark.usefixtures("real_points")
def test_an_unknown_build_of_flashmla_never_gets_its_decode_kernel_for_prefill() -> None:
    plan = _open(gpu=H100).plan(Batch.extend([4096], [128]))

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
                    us = (9 - i) * (10.0 + batch.q_tokens)
                    rows.append(
                        Measurement(point.name, str(batch), arm.name, Status.OK, us, us, us)
                    )
    table = Table(key, detect.KNOWN[H100], tuple(rows), "made up", "2025-01-01T00:00:00Z")
    opened = _open(_write(tmp_path / "t.tsv", table), gpu=H100)

    plan = opened.plan(Batch.extend([1920], [128]))
    last = list(POINTS["prefill"].candidates(setting))[-1].name
    assert plan.reasons["prefill_path"].verdict is Verdict.WIN
    assert plan.prefill_path == last.partition("/")[0]
    assert plan.sparse_prefill == last.partition("/")[2]
    assert opened.plan(Batch.verify([8192] * 4, 2)).reasons["indexer_layout"].estimates_us
