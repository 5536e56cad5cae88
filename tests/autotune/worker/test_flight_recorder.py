"""The flight recorder: what a worker did last, also after its death."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from nsa_tune.autotune.worker.flight_recorder import NO_ARM, FlightRecorder, Stage


def test_the_other_process_reads_the_newest_note() -> None:
    ours = FlightRecorder.create()
    theirs = FlightRecorder(os.dup(ours.descriptor))
    assert (ours.read().stage, ours.read().arm) == (Stage.STARTING, NO_ARM)

    before = time.monotonic()
    theirs.note(Stage.SAMPLE, 7)

    activity = ours.read()
    assert (activity.stage, activity.arm) == (Stage.SAMPLE, 7)
    assert before <= activity.since <= time.monotonic()
    theirs.close()
    assert ours.read() == activity
    ours.close()


_NOTE = """
import os, sys
from nsa_tune.autotune.worker.flight_recorder import FlightRecorder, Stage
FlightRecorder(int(sys.argv[1])).note(Stage.FIRST, 3)
os.kill(os.getpid(), 9)
"""


def test_a_note_survives_the_process_that_made_it() -> None:
    recorder = FlightRecorder.create()
    command = [sys.executable, "-c", _NOTE, str(recorder.descriptor)]

    done = subprocess.run(
        command, pass_fds=[recorder.descriptor], cwd=Path(__file__).parents[3], check=False
    )

    assert done.returncode == -9
    assert (recorder.read().stage, recorder.read().arm) == (Stage.FIRST, 3)
    recorder.close()
