"""Which schedule a target and a trace give, and the warning about a trace that does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa_tune import UsageError
from nsa_tune.autotune.search.adaptive import Adaptive
from nsa_tune.autotune.search.exhaustive import Exhaustive
from nsa_tune.autotune.search.schedule import MakeSchedule
from nsa_tune.autotune.search.strategy import schedule_for
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device

SETTING = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))
PREFILL = POINTS["prefill"]


def trace(path: Path, tokens: int) -> Path:
    lines = [
        {"timestamp": 9000 * i, "input_length": tokens + i, "output_length": 2} for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def words(make: MakeSchedule) -> set[str]:
    schedule, found = make([PREFILL], SETTING, ()), set()
    while (job := schedule.next()) is not None:
        found.add(str(job.batch))
        schedule.done(job, [])
    return found


def test_a_target_regret_of_zero_measures_the_whole_grid() -> None:
    assert schedule_for(0.0, None) is Exhaustive
    assert isinstance(schedule_for(0.01, None)([PREFILL], SETTING, ()), Adaptive)


def test_the_whole_grid_is_followed_by_a_trace_s_batches(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", 30)

    traced = words(schedule_for(0.0, path)) - words(schedule_for(0.0, None))

    assert traced
    assert all(word.startswith("extend:0+") for word in traced)


def test_a_point_without_two_arms_takes_no_batch_of_a_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No kernel of `indexer_metadata` runs on a CPU, and its grid has batches of any size."""
    path = trace(tmp_path / "t.jsonl", 30)

    schedule_for(0.01, path)([POINTS["indexer_metadata"]], SETTING, ())

    (record,) = caplog.records
    assert "240 of 240 passes" in record.getMessage()


@pytest.mark.parametrize("target", [0.0, 0.01])
def test_batches_of_a_trace_that_are_left_out_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target: float
) -> None:
    """Otherwise nobody would notice that a trace of long prompts is not used on a small grid."""
    path = trace(tmp_path / "t.jsonl", 100_000)

    make = schedule_for(target, path)
    assert not caplog.records
    make([PREFILL], SETTING, ())

    (record,) = caplog.records
    assert "t.jsonl: 270 of 270 passes drawn from it are left out" in record.getMessage()


def test_a_trace_that_is_used_completely_causes_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule_for(0.01, trace(tmp_path / "t.jsonl", 30))(list(POINTS.values())[:3], SETTING, ())

    assert not caplog.records


def test_a_trace_that_cannot_be_read_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        schedule_for(0.01, tmp_path / "none.jsonl")
