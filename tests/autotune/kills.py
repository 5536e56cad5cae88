"""Kill a run at random moments, again and again: ``python -m tests.autotune.kills 100``."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LONGEST_S = 6.0
_RUN = """
import sys
from pathlib import Path
from nsa_tune.autotune.runner.run import NoProgress, RunRequest, run

class Tell(NoProgress):
    def batch(self, done, total, point, batch, rows, seconds):
        for row in rows:
            print(row.batch, row.arm, flush=True)

result = run(RunRequest(Path(sys.argv[1]), device="cpu"), Tell(),
             registry="tests.autotune.fake_point:HUNDREDS")
assert result.outcome == "done"
"""
Rows = set[tuple[str, str]]


class Trial:
    """Runs of one database after the other, each killed until it is complete."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self._directory = directory
        self._random = random.Random(seed)
        self.kills = 0
        self.finished = 0
        """Databases that were complete in the end, and equal to an undisturbed one."""
        self._expected = self._undisturbed()

    def kill(self, times: int, longest_s: float = _LONGEST_S) -> None:
        """Kill runs `times` times in all, then let the last one finish."""
        while self.kills < times:
            database = self._directory / f"{self.finished}.db"
            reported: Rows = set()
            while self.kills < times and not self._complete(database):
                reported |= self._killed(database, self._random.uniform(0, longest_s))
                self.check(database, reported)
            self._start(database).communicate()
            self.check(database, reported)
            assert _stored(database) == self._expected, "the tables differ"
            self.finished += 1

    def _undisturbed(self) -> Rows:
        database = self._directory / "undisturbed.db"
        run = self._start(database)
        run.communicate()
        assert run.returncode == 0
        return _stored(database)

    def _complete(self, database: Path) -> bool:
        return database.exists() and len(_stored(database)) == len(self._expected)

    def _start(self, database: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _RUN, str(database)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def _killed(self, database: Path, after_s: float) -> Rows:
        """Start a run and kill it; returns the rows that it reported as stored."""
        with self._start(database) as run:
            time.sleep(after_s)
            workers = processes_of(run.pid)
            run.send_signal(signal.SIGKILL)
            assert run.stdout is not None
            lines = run.stdout.read().splitlines()
        self.kills += run.returncode == -signal.SIGKILL
        _wait_until_gone(workers)
        return {(batch, arm) for batch, arm in map(str.split, lines)}

    def check(self, database: Path, reported: Rows) -> None:
        """The database is whole, and has every row that was reported, once."""
        if not database.exists():
            assert not reported
            return
        with closing(sqlite3.connect(database)) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        stored = _stored(database)
        assert reported <= stored, f"lost: {reported - stored}"


def _stored(database: Path) -> Rows:
    with closing(sqlite3.connect(database)) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'measurements'").fetchone():
            return set()
        rows = db.execute("SELECT batch, arm FROM measurements").fetchall()
    assert len(rows) == len(set(rows)), "a row is there twice"
    for batch in {batch for batch, _ in rows}:
        assert sum(row[0] == batch for row in rows) == 2, f"half of {batch} is there"
    return set(rows)


def processes_of(pid: int) -> list[int]:
    """The process ids of what `pid` started and what still runs."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(word) for word in text.split()]


def _wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, f"{pids} outlived their run"
        time.sleep(0.02)


def main(times: int) -> None:
    """Say how it went on stdout."""
    with tempfile.TemporaryDirectory() as directory:
        trial = Trial(Path(directory), seed=times)
        trial.kill(times)
    sys.stdout.write(
        f"{trial.kills} kills, {trial.finished} databases complete and equal to an undisturbed "
        "one, nothing lost, integrity ok, no worker left\n"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
