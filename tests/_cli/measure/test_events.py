"""Events of a run: one JSON object a line, for programs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from nsa_tune import UsageError
from nsa_tune._cli.measure.events import EventProgress, events_into
from nsa_tune.autotune.runner.progress import Incident, Progress, Stored, Together
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import PROFILES
from nsa_tune.backend.types.records import Measurement, Status
from tests.reports.synthetic import H100, key_of, measured, toy_point

POINT = toy_point()
BATCH = Batch.extend([0], [64])
SETTING = Setting(PROFILES["deepseek-v3.2"], 128, KVLayout.FP8_PACKED, H100)


def test_each_event_is_a_line_with_its_schema() -> None:
    file = io.StringIO()
    events = EventProgress(file)
    failed = Measurement("toy", str(BATCH), "flat/a", Status.FAILED, reason="no\nkernel ü")

    events.start(SETTING, key_of(), 12, 34)
    events.batch(
        Stored(1, 12, POINT, BATCH, [measured("toy", BATCH, "steep/a", 5.0, 0.1), failed], 1.25)
    )
    events.incident(Incident("quarantined", "flat/a is out"))
    events.end("done", measured=2)

    start, batch, quarantined, end = map(json.loads, file.getvalue().splitlines())
    assert {e["schema"] for e in (start, batch, quarantined, end)} == {"nsa-tune/event/2"}
    assert (start["event"], start["batches"], start["skipped"]) == ("start", 12, 34)
    assert start["key"]["digest"] == key_of().digest
    assert (batch["event"], batch["done"], batch["total"], batch["seconds"]) == (
        "batch", 1, 12, 1.25,
    )  # fmt: skip
    assert (batch["point"], batch["batch"]) == ("toy", "extend:0+64")
    assert batch["rows"][0]["latency_us"] == 5.0
    assert batch["rows"][1] == {"arm": "flat/a", "status": "failed", "reason": "no\nkernel ü"}
    assert (quarantined["event"], quarantined["text"]) == ("quarantined", "flat/a is out")
    assert end == {
        "schema": "nsa-tune/event/2", "event": "end", "outcome": "done", "measured": 2,
    }  # fmt: skip


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    for outcome in ("budget", "done"):
        with events_into(str(tmp_path / "events")) as events:
            assert events is not None
            events.end(outcome)

    lines = (tmp_path / "events").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["budget", "done"]


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="events cannot be written to"),
        events_into(str(tmp_path / "none" / "events")),
    ):
        raise AssertionError


def test_a_run_goes_on_when_events_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    events = EventProgress(Gone())
    events.end("done")
    events.end("done")

    assert [record.getMessage() for record in caplog.records] == [
        "no more events are written: Broken pipe"
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_run_ends_well_though_the_disk_was_full(caplog: pytest.LogCaptureFixture) -> None:
    with events_into("/dev/full") as events:
        assert events is not None
        events.end("done")

    assert [record.getMessage() for record in caplog.records] == [
        "no more events are written: No space left on device"
    ]


def test_without_a_target_there_are_no_events() -> None:
    with events_into(None) as events:
        assert events is None


def test_calls_are_passed_on_to_every_progress() -> None:
    file = io.StringIO()

    together = Together(EventProgress(file), Progress(), EventProgress(file))
    together.start(SETTING, key_of(), 1, 0)
    together.batch(Stored(1, 1, POINT, BATCH, [], 1.0))
    together.incident(Incident("quarantined", "out"))

    names = [json.loads(line)["event"] for line in file.getvalue().splitlines()]
    assert names == ["start", "start", "batch", "batch", "quarantined", "quarantined"]
