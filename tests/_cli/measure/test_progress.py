"""Progress of a run: who sees what."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from nsa_tune._cli.measure.progress import BarProgress, LineProgress, RunProgress, progress_for
from nsa_tune.autotune.runner.progress import Incident, Stored
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import PROFILES
from nsa_tune.backend.types.records import Measurement, Status
from tests.reports.synthetic import H100, key_of, measured, toy_point

POINT = toy_point()
BATCH = Batch.extend([0], [64])
SETTING = Setting(PROFILES["deepseek-v3.2"], 128, KVLayout.FP8_PACKED, H100)


def _console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def _text(progress: RunProgress) -> str:
    file = progress.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def _rows(steep_us: float) -> list[Measurement]:
    return [
        measured("toy", BATCH, "steep/a", steep_us, 0.01),
        measured("toy", BATCH, "flat/a", 50.0, 0.01),
    ]


def test_the_start_names_model_heads_layout_and_device() -> None:
    progress, _ = progress_for(_console(terminal=False), quiet=False)

    progress.start(SETTING, key_of(), 12, 34)

    assert _text(progress) == (
        "deepseek-v3.2, 128 local heads, fp8_packed on NVIDIA H100 80GB HBM3: about 12 batches to "
        "measure; 34 measurements stored before\n"
    )


def test_a_count_of_one_is_singular() -> None:
    progress, _ = progress_for(_console(terminal=False), quiet=False)

    progress.start(SETTING, key_of(), 1, 1)

    assert _text(progress).endswith("about 1 batch to measure; 1 measurement stored before\n")


def test_plain_lines_are_printed_every_ten_seconds_and_at_the_end() -> None:
    progress, _ = progress_for(_console(terminal=False), quiet=False)

    for done, seconds in ((1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)):
        progress.batch(Stored(done, 4, POINT, BATCH, _rows(10.0 * done), seconds))

    assert isinstance(progress, LineProgress)
    assert _text(progress).splitlines() == [
        "2 batches measured, about 2 left, 12 s; toy",
        "4 batches measured, 14 s; toy",
    ]


def test_the_time_left_goes_by_the_latest_batches() -> None:
    progress, _ = progress_for(_console(terminal=False), quiet=False)

    for done in range(1, 21):
        progress.batch(Stored(done, 40, POINT, BATCH, _rows(10.0), 30.0 + done))

    assert "1 batch measured, about 39 left, 31 s; toy" in _text(progress)
    assert "11 batches measured, about 29 left, 41 s, about 29 s more; toy" in _text(progress)


def test_slow_first_batches_and_pauses_say_nothing_of_the_time_left() -> None:
    progress, _ = progress_for(_console(terminal=False), quiet=False)
    ends_s = [20.0, 35.0, 41.0, *(41.0 + i / 10 for i in range(1, 200))]
    ends_s += [end_s + 30.0 for end_s in (61.0 + i / 10 for i in range(1, 200))]

    for done, seconds in enumerate(ends_s, start=1):
        progress.batch(Stored(done, done + 60, POINT, BATCH, _rows(10.0), seconds))

    left = re.findall(r"about (\d+) s more", _text(progress))
    assert len(left) == 3
    assert set(left[1:]) == {"6"}


def test_a_line_is_short_whatever_the_batch_is() -> None:
    progress, _ = progress_for(_console(terminal=False), quiet=False)
    long = Batch.extend(list(range(500)), [1 + i for i in range(500)])
    failed = Measurement("toy", str(long), "flat/a", Status.FAILED, reason="no kernel")

    progress.batch(Stored(1234, 5678, POINT, long, [failed] * 1000, 1e5))

    lines = _text(progress).splitlines()
    assert len(lines) == 1001
    assert all(len(line) <= 100 for line in lines)


def test_a_terminal_gets_a_bar_with_the_batch() -> None:
    progress, shown = progress_for(_console(terminal=True), quiet=False)

    with shown:
        progress.start(SETTING, key_of(), 2, 0)
        progress.batch(Stored(1, 2, POINT, BATCH, _rows(10.0), 1.0))
        assert isinstance(progress, BarProgress)
        progress.bar.refresh()

    assert "1 batch measured, about 1 left" in _text(progress)
    assert "1.0 batches/s  extend:0+64" in _text(progress)


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_says_nothing(terminal: bool) -> None:
    progress, shown = progress_for(_console(terminal=terminal), quiet=True)

    with shown:
        progress.start(SETTING, key_of(), 1, 0)
        progress.batch(Stored(1, 1, POINT, BATCH, _rows(10.0), 99.0))

    assert _text(progress) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_failure_is_printed_at_once_without_control_characters(terminal: bool) -> None:
    progress, shown = progress_for(_console(terminal=terminal), quiet=False)
    failed = Measurement("toy", str(BATCH), "flat/a", Status.FAILED, reason="[red]out of\x07memory")

    with shown:
        progress.batch(Stored(1, 5, POINT, BATCH, [failed], 1.0))

    assert "flat/a failed on extend:0+64: [red]out of?memory" in _text(progress)


def test_failures_and_quarantined_arms_are_counted_with_the_pace() -> None:
    progress, _ = progress_for(_console(terminal=False), quiet=False)
    failed = Measurement("toy", str(BATCH), "flat/a", Status.WRONG, reason="relative error 1")

    progress.batch(Stored(1, 4, POINT, BATCH, [*_rows(10.0)[:1], failed], 4.0))
    progress.incident(Incident("quarantined", "flat/a of toy is quarantined"))

    assert progress.pace(4.0) == "0.2 batches/s, 1 arm failed, 1 quarantined"
    assert "flat/a of toy is quarantined\n" in _text(progress)
