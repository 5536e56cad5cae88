"""The schedule is taken out of rows that were timed with it, and out of no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.correct_schedule import corrected, schedule_of
from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.db.reader import shipped
from nsa_tune.db.text_table import read_text


def _row(arm: str, batch: str, latency_us: float, pass_us: float | None = None) -> Measurement:
    return Measurement(
        "v4_prefill_c4", batch, arm, Status.OK, latency_us, latency_us - 1, latency_us + 1, 8,
        pass_us=pass_us,
    )  # fmt: skip


def test_between_measured_rows_a_schedule_grows_in_a_straight_line() -> None:
    (path,) = (path for path in shipped() if path.stem == "h200_deepseek-v4_h128_fp8")
    rows = [
        _row("with_kvcache", "extend:0+64", 20, 18.0),
        _row("with_kvcache", "extend:512+64", 20, 19.0),
        _row("with_kvcache", "extend:0+256", 60, 34.5),
        _row("sparse_fwd", "extend:0+256", 50),
    ]
    at = schedule_of(replace(read_text(path), measurements=tuple(rows)))

    assert [at(count) for count in (64, 160, 256)] == [18.5, 26.5, 34.5]
    assert at(1) == 18.5
    assert at(1000) == 34.5


def test_a_row_with_a_schedule_loses_it_and_says_so() -> None:
    row = corrected(_row("with_kvcache", "extend:0+64", 50), lambda _: 18.5, "NVIDIA H200")

    assert (row.latency_us, row.low_us, row.high_us, row.pass_us) == (31.5, 30.5, 32.5, 18.5)
    assert row.reason == "the schedule's time is that of NVIDIA H200"


@pytest.mark.parametrize("arm", ["sparse_fwd", "mla/flashmla_sparse"])
def test_other_arms_stay_as_they_are(arm: str) -> None:
    row = _row(arm, "extend:0+64", 50)
    assert corrected(row, lambda _: 18.5, "NVIDIA H200") is row


def test_an_interval_that_began_below_the_schedule_stays_positive() -> None:
    row = corrected(_row("with_kvcache", "extend:0+64", 19), lambda _: 18.5, "NVIDIA H200")
    assert row.low_us == 0.1
