"""`nsa-tune run`: interrupted, terminated, on databases that take no rows, and its options."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from nsa_tune.db.reader import read_database
from nsa_tune.db.text_table import read_text
from tests.shell import Result, Shell

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "nsa_tune.cli", "run", "--device", "cpu", "--json"]
IN_PROCESS = ("run", "--device", "cpu", "--json", "--budget", "0", "--no-isolate")


@contextmanager
def running(database: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has stored at least one batch."""
    events = database.with_suffix(".events")
    with subprocess.Popen(
        [*COMMAND, "--db", str(database), "--events", str(events), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        end = time.monotonic() + 120
        while not (events.exists() and '"event": "batch"' in events.read_text()):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        yield run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_in_seconds_with_130_and_its_table(
    tmp_path: Path, number: signal.Signals
) -> None:
    database = tmp_path / "t.db"
    with running(database) as run:
        run.send_signal(number)
        out, err = run.communicate(timeout=120)

    assert run.returncode == 130
    document = json.loads(out)
    assert document["outcome"] == "interrupted"
    assert document["measured"] > 0
    assert "interrupted: " in err
    end = json.loads(database.with_suffix(".events").read_text().splitlines()[-1])
    assert (end["event"], end["outcome"]) == ("end", "interrupted")
    with closing(sqlite3.connect(database)) as db:
        assert db.execute("SELECT outcome FROM runs").fetchall() == [("interrupted",)]
        stored = db.execute("SELECT count(*) FROM measurements").fetchone()
    assert stored == (document["measured"],)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_before_the_first_batch_ends_with_130_and_a_message(
    tmp_path: Path, number: signal.Signals
) -> None:
    """While the worker loads torch there is nothing to report yet."""
    database = tmp_path / "t.db"
    events = database.with_suffix(".events")
    with subprocess.Popen(
        [*COMMAND, "--db", str(database), "--events", str(events)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as run:  # fmt: skip
        end = time.monotonic() + 120
        while not events.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        run.send_signal(number)
        _, err = run.communicate(timeout=120)

    assert run.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


def test_points_may_be_written_with_spaces_and_the_protocol_names_the_overlap(
    shell: Shell, tmp_path: Path
) -> None:
    database = tmp_path / "t.db"
    done = shell(*IN_PROCESS, "--db", str(database), "--points", "decode, indexer_layout",
                 "--overlap", "0.8")  # fmt: skip

    assert done.code == 0, done.err
    assert json.loads(done.out)["measured"] == 2
    assert [table.key.protocol for table in read_database(database)] == ["cpu-clock/1 overlap 0.8"]


def test_a_database_that_takes_no_more_rows_ends_with_a_message(tmp_path: Path) -> None:
    database = tmp_path / "t.db"
    with running(database) as run, closing(sqlite3.connect(database)) as other:
        other.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON measurements "
            "BEGIN SELECT raise(ABORT, 'no more'); END"
        )
        other.commit()
        _, err = run.communicate(timeout=120)

    assert run.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith("nsa-tune: ")]
    (path,) = re.findall(r"nsa-tune db import (\S+)`", line)
    assert len(read_text(Path(path)).measurements) in (2, 3)
    assert "Traceback" not in err


def test_a_lossy_arm_is_measured_on_request_and_the_run_says_what_it_rounds(
    shell: Shell, tmp_path: Path
) -> None:
    def run(name: str, *options: str) -> tuple[Result, set[str]]:
        database = tmp_path / name
        done = shell(*IN_PROCESS, "--db", str(database), "--points", "prefill", *options)
        if done.code:
            return done, set()
        return done, {row.arm for table in read_database(database) for row in table.measurements}

    plain, without = run("plain.db")
    asked, with_it = run("asked.db", "--allow-lossy", "torch_sparse_q8")
    wrong, _ = run("wrong.db", "--allow-lossy", "torch_kv")

    assert with_it - without == {"mla/torch_sparse_q8"}
    assert "torch_sparse_q8 rounds q, keys, values" in asked.err
    assert asked.err.startswith("no GPU is measured: this demonstrates a run on a CPU")
    assert "rounds" not in plain.err
    assert wrong.code == 2
    assert "unknown lossy arm 'torch_kv'" in wrong.err
