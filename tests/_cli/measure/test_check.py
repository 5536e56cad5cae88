"""`nsa-tune check` on the command line: what it prints, and with which code it ends."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nsa_tune.cli", *arguments],
        cwd=ROOT,
        # One thread: neighbours on the machine then slow all arms alike.
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some indexer batches that this machine measured."""
    path = tmp_path_factory.mktemp("check") / "t.db"
    done = command("run", "--device", "cpu", "--points", "indexer_layout", "--db", str(path), "-q",
                   "--budget", "2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


def test_a_doctored_table_fails_with_4_and_is_named(database: Path, tmp_path: Path) -> None:
    """All times are a small part of what they are, and the slowest arm's are the least."""
    doctored = tmp_path / "doctored.db"
    doctored.write_bytes(database.read_bytes())
    with closing(sqlite3.connect(doctored)) as db:
        db.execute(
            "UPDATE measurements SET latency_us = iif(arm LIKE 'flatten%', 10, 11), "
            "low_us = iif(arm LIKE 'flatten%', 9.9, 10.9), "
            "high_us = iif(arm LIKE 'flatten%', 10.1, 11.1)"
        )
        db.commit()

    answer = command("check", "--device", "cpu", "--db", str(doctored), "--json")

    assert answer.returncode == 4, answer.stderr
    document = json.loads(answer.stdout)
    assert document["schema"] == "nsa-tune/check/1"
    assert document["holds"] is False
    assert document["problems"]
    with closing(sqlite3.connect(doctored)) as db:
        assert db.execute("SELECT holds FROM checks").fetchall() == [(0,)]


def test_the_exit_code_says_whether_the_table_holds(database: Path) -> None:
    answer = command("check", "--device", "cpu", "--db", str(database), "--anchors", "2", "-q")

    word = "does not hold" if answer.returncode else "holds"
    assert answer.returncode in (0, 4), answer.stderr
    assert f"{database} {word} here: " in answer.stdout
    assert answer.stderr == ""


def test_without_a_table_the_exit_code_is_3(database: Path) -> None:
    answer = command("check", "--device", "cpu", "--db", str(database), "--heads", "2")

    assert answer.returncode == 3
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
