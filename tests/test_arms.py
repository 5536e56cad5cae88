"""benchmarks/arms.py: every arm has a row, and a row says the worst that was found."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import arms
from nsa_tune import Batch
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Status

H200 = Setting(
    profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, KNOWN["NVIDIA H200"],
    {"sgl-flash-mla": "1.0.0", "sgl-deep-gemm": "0.1.5.post1"},
)  # fmt: skip


def main(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["arms", "--device", "cpu", *words])
    arms.main()


def test_every_arm_of_a_layout_has_a_row_with_its_error_and_time_or_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, shown = tmp_path / "arms.json", tmp_path / "arms.md"
    options = ("--points", "decode", "--kv-dtype", "fp8", "--json", str(kept), "--markdown")
    main(monkeypatch, *options, str(shown))

    document = json.loads(kept.read_text())
    assert document["schema"] == "nsa-tune/arms/2"
    rows = {row["arm"]: row for row in document["arms"]}
    packed = [arm for arm in POINTS["decode"].arms if KVLayout.FP8_PACKED in arm.layouts]
    assert list(rows) == [arm.name for arm in packed]
    assert rows["flashmla_kv"]["status"] == "not run"
    assert rows["flashmla_kv"]["reason"] == "no kernels for cpu"
    ran = rows["torch_kv"]
    assert ran["status"] == "ok"
    assert 0 < ran["error"] < 0.02
    assert ran["latency_us"] > 0
    assert Batch.parse(ran["batch"]).mode in POINTS["decode"].modes
    assert shown.read_text() == capsys.readouterr().out


def test_after_the_budget_no_batch_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(monkeypatch, "--points", "decode", "--budget", "0", "--json", str(tmp_path / "none"))

    rows = json.loads((tmp_path / "none").read_text())["arms"]
    assert {row["status"] for row in rows} == {"not run"}
    assert {row["reason"] for row in rows if row["arm"].startswith("torch")} == {arms._NOT_TRIED}


def test_a_row_keeps_the_largest_error_and_the_first_failure_and_time() -> None:
    row = arms.Row("prefill", "mla/x", "tiny", 4, "bf16")

    def add(batch: str, status: Status, error: float | None, us: float | None = None) -> None:
        row.add(Measurement("prefill", batch, "mla/x", status, us, error=error, reason=batch))

    add("extend:0+1", Status.OK, 0.004, 10.0)
    add("extend:0+2", Status.OK, 0.002, 20.0)
    assert (row.status, row.error, row.latency_us, row.batch) == ("ok", 0.004, 10.0, "extend:0+1")
    add("extend:0+3", Status.WRONG, 0.5)
    add("extend:0+4", Status.FAILED, None)
    add("extend:0+5", Status.OK, 0.001, 30.0)
    assert (row.status, row.error, row.latency_us) == ("wrong", 0.5, 10.0)
    assert row.reason == "extend:0+3: extend:0+3"


def test_what_is_not_here_or_not_asked_for_is_said() -> None:
    prefill = POINTS["prefill"]
    q8, triton = prefill.arm("mla/flashmla_sparse_q8"), prefill.arm("mla/triton_sparse_mla")

    assert arms.why_not(q8, H200).startswith("lossy, and not asked for: rounds q, keys")
    asked = replace(H200, lossy=frozenset({"flashmla_sparse_q8"}))
    assert arms.why_not(q8, asked) == ""
    absent = replace(asked, missing=frozenset({"sglang_q8", "sglang_triton"}))
    assert arms.why_not(q8, absent) == "sglang_q8 is not installed"
    assert arms.why_not(triton, replace(absent, heads=16)) == "sglang_triton is not installed"
    assert arms.why_not(prefill.arm("mha/trtllm_ragged"), H200) == "no kernels for sm90"


@pytest.mark.parametrize("name", arms._BATCHES)
def test_each_hopper_arm_may_run_on_one_of_its_point_s_batches(name: str) -> None:
    model = "deepseek-v4" if name.startswith("v4") else "deepseek-v3.2"
    profile = profile_of(model)
    lossy = frozenset({"flashmla_sparse_q8"})
    layouts = [KVLayout.V4_PAGED] if model == "deepseek-v4" else list(KVLayout)[:2]

    for layout in layouts:
        setting = replace(H200, profile=profile, layout=layout, lossy=lossy)
        # Some arms are for the heads of a rank.
        few = replace(setting, heads=8)
        for arm in POINTS[name].candidates(setting):
            allowed = [
                batch
                for heads in (setting, few)
                for batch in arms.batches_of(POINTS[name], heads)
                if arm.allowed(batch, heads) is None
            ]
            assert allowed, arm.name
