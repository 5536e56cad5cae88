"""Which table answers, from an exact one down to the engine's baseline, and what that says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune import Batch, NoTunedData, UsageError
from nsa_tune.backend.baselines import VLLM_0_33_0
from nsa_tune.backend.dispatch import opening
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.dispatch.table_planner import Match
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.records import Device, Status
from tests.backend.fake_point import DEVICE, KEY, table_of
from tests.backend.machine import SLOW_DENSE, TIMES, opened, written

_SHORT = Batch.extend([0], [64])


pytestmark = pytest.mark.usefixtures("machine")


def test_a_table_of_these_versions_is_exact(tmp_path: Path) -> None:
    found = opened(written(tmp_path / "t.tsv", table_of(TIMES)), strict=True)

    assert found.match is Match.EXACT
    assert "stale" not in found.source


def test_a_table_of_other_versions_is_stale_field_by_field(tmp_path: Path) -> None:
    key = replace(KEY, driver="0.9", libraries=(("torch", "1.0"),))
    path = written(tmp_path / "t.tsv", table_of(TIMES, key))

    found = opened(path)

    assert found.match is Match.STALE
    assert "stale: driver: measured with 0.9, here 1.0; torch: measured with 1.0" in found.source
    assert found.plan(_SHORT).prefill_path == "mha"
    with pytest.raises(NoTunedData, match=r"t\.tsv is stale: driver: measured with 0\.9, here 1"):
        opened(path, strict=True)


def test_another_gpu_of_the_architecture_answers_before_the_rule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = written(tmp_path / "t.tsv", table_of(SLOW_DENSE))
    sibling = replace(DEVICE, name="Test GPU Mini", sms=66)
    monkeypatch.setitem(detect.KNOWN, sibling.name, sibling)
    monkeypatch.setitem(detect.KNOWN, "Other GPU", replace(sibling, name="Other GPU", arch="sm99"))

    found = opened(path, gpu=sibling.name)

    assert found.match is Match.ARCHITECTURE
    assert "measured on Test GPU, another GPU of sm90" in found.source
    assert found.setting.device is sibling, "limits are those of the device that runs"
    assert found.plan(_SHORT).prefill_path == "mla"
    assert opened(path, gpu="Other GPU").match is Match.BASELINE
    with pytest.raises(NoTunedData, match="gpu"):
        opened(path, gpu=sibling.name, strict=True)


def test_an_unknown_gpu_gets_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "POINTS", POINTS)

    found = opened(gpu="NVIDIA Z9000")
    plan = found.plan(Batch.extend([0], [100]))

    assert found.match is Match.BASELINE
    assert found.setting.device == Device("NVIDIA Z9000", "")
    assert (plan.prefill_path, plan.sparse_prefill) == ("mla", "flashmla_kv")
    assert plan.reasons["prefill_path"].verdict is Verdict.BASELINE
    assert found.plan(Batch.verify([100], 2)).indexer_layout == "flatten"


def test_another_engine_s_rule_can_answer(tmp_path: Path) -> None:
    del tmp_path
    found = opened(baseline=VLLM_0_33_0)

    assert found.source.startswith("the baseline of vLLM 0.33.0: nothing is tuned")


# --- variables


def test_disabled_means_the_rule_whatever_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = written(tmp_path / "t.tsv", table_of(TIMES))
    monkeypatch.setenv("NSA_TUNE_DISABLE", "1")

    found = opened(path)

    assert (found.match, found.table) == (Match.BASELINE, None)
    assert found.source.endswith("NSA_TUNE_DISABLE is set")


def test_assert_hit_refuses_what_is_not_exact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = written(tmp_path / "t.tsv", table_of(TIMES))
    monkeypatch.setenv("NSA_TUNE_ASSERT_HIT", "1")

    assert opened(path).match is Match.EXACT
    monkeypatch.setattr(detect, "driver_version", lambda: "2.0")
    with pytest.raises(NoTunedData, match=r"here 2\.0 \(NSA_TUNE_ASSERT_HIT is set\)"):
        opened(path)


def test_a_forced_arm_is_taken_where_no_limit_forbids_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NSA_TUNE_FORCE", "fake=mha/dense")
    found = opened(written(tmp_path / "t.tsv", table_of(SLOW_DENSE)))

    forced, long = found.plan(_SHORT), found.plan(Batch.extend([4096], [64]))

    assert forced.prefill_path == "mha"
    assert forced.reasons["prefill_path"].verdict is Verdict.FORCED
    assert forced.reasons["prefill_path"].source == "NSA_TUNE_FORCE"
    assert long.prefill_path == "mla", "too long for dense"


def test_the_named_database_is_searched_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written(tmp_path / "shipped" / "s.tsv", table_of(TIMES))
    monkeypatch.setenv("NSA_TUNE_DB", str(written(tmp_path / "n.tsv", table_of(SLOW_DENSE))))

    assert opened().plan(_SHORT).prefill_path == "mla"


def test_a_table_where_everything_failed_does_not_answer(tmp_path: Path) -> None:
    table = table_of(SLOW_DENSE)
    rows = [replace(row, status=Status.FAILED, latency_us=None) for row in table.measurements]
    named = written(tmp_path / "n.tsv", replace(table, measurements=tuple(rows)))
    written(tmp_path / "shipped" / "s.tsv", table_of(TIMES))

    assert opened(named).plan(_SHORT).prefill_path == "mha"


def test_a_table_of_queries_that_share_keys_answers_only_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = replace(KEY, protocol=f"{KEY.protocol} overlap 0.8")
    named = written(tmp_path / "n.tsv", table_of(SLOW_DENSE, key))
    assert opened(named).plan(_SHORT).prefill_path == "mla"

    monkeypatch.setenv("NSA_TUNE_DB", str(named))
    written(tmp_path / "shipped" / "s.tsv", table_of(TIMES))

    assert opened(named).plan(_SHORT).prefill_path == "mha"


@pytest.mark.parametrize("layers", [0, -1, 2.0, True, "61"])
def test_layers_that_no_model_has_are_refused(layers: object) -> None:
    with pytest.raises(UsageError) as caught:
        opened(layers=layers)

    assert str(caught.value) == f"layers must be a positive whole number, got {layers!r}"


def test_layers_are_the_model_s_unless_told() -> None:
    assert opened().setting.sharing == 61
    assert opened(layers=15).setting.sharing == 15
