"""Kill runs at random moments, again and again.

python -m tests.autotune.kills 100               # one run, into one database after the other
python -m tests.autotune.kills 100 --writers 8   # `nsa-tune run` eight times into one database
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LONGEST_S = 6.0
_RUN = """
import sys
from pathlib import Path
from nsa_tune.autotune.runner.run import Progress, RunRequest, run

class Tell(Progress):
    def batch(self, stored):
        for row in stored.rows:
            print(row.batch, row.arm, flush=True)

result = run(RunRequest(Path(sys.argv[1]), device="cpu"), Tell(),
             registry="tests.autotune.fake_point:HUNDREDS")
assert result.outcome == "done"
"""
_KEYS = [
    *((f"tiny {heads} {dtype}").split() for heads in (1, 2, 4) for dtype in ("bf16", "fp8")),
    *(f"tiny-v4 {heads} fp8".split() for heads in (2, 4)),
]
"""Model, local heads and format of up to eight writers."""
Rows = set[tuple[str, str]]


def started(code: str, database: Path) -> subprocess.Popen[str]:
    """A process that runs `code`, which is given `database`."""
    return subprocess.Popen(
        [sys.executable, "-c", code, str(database)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


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
            started(_RUN, database).communicate()
            self.check(database, reported)
            assert _stored(database) == self._expected, "the tables differ"
            self.finished += 1

    def _undisturbed(self) -> Rows:
        database = self._directory / "undisturbed.db"
        run = started(_RUN, database)
        run.communicate()
        assert run.returncode == 0
        return _stored(database)

    def _complete(self, database: Path) -> bool:
        return database.exists() and len(_stored(database)) == len(self._expected)

    def _killed(self, database: Path, after_s: float) -> Rows:
        """Start a run and kill it; returns the rows that it reported as stored."""
        with started(_RUN, database) as run:
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


class Crowd:
    """`nsa-tune run` with the reference arms, of several keys into one database at once."""

    def __init__(self, directory: Path, writers: int, seed: int = 0) -> None:
        self.database = directory / "crowd.db"
        self._random = random.Random(seed)
        self._events = [directory / f"{number}.jsonl" for number in range(writers)]
        self._runs = [self._started(number) for number in range(writers)]
        self.kills = 0

    def kill(self, times: int, longest_s: float = 3.0) -> None:
        """Kill and start again a run at random, `times` times; then kill them all."""
        while self.kills < times:
            time.sleep(self._random.uniform(0, longest_s))
            number = self._random.randrange(len(self._runs))
            self._end(number)
            self._runs[number] = self._started(number)
        for number in range(len(self._runs)):
            self._end(number)

    def check(self) -> int:
        """The database is whole and has each row that a run reported, once; how many these are."""
        cells = (
            "SELECT digest, point, batch, arm FROM measurements "
            "JOIN runs ON runs.id = run_id JOIN keys ON keys.id = key_id"
        )
        with closing(sqlite3.connect(self.database)) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert not db.execute("PRAGMA foreign_key_check").fetchall()
            stored = Counter(db.execute(cells).fetchall())
        reported = {cell for path in self._events for cell in _reported(path)}
        assert reported <= set(stored), f"lost: {reported - set(stored)}"
        assert max(stored.values()) == 1, f"twice: {stored.most_common(3)}"
        return len(reported)

    def _started(self, number: int) -> subprocess.Popen[str]:
        model, heads, kv_dtype = _KEYS[number]
        words = f"run --device cpu --model {model} --heads {heads} --kv-dtype {kv_dtype}"
        return subprocess.Popen(
            [sys.executable, "-m", "nsa_tune.cli", *words.split(), "--target-regret", "0",
             "--db", str(self.database), "--events", str(self._events[number])],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def _end(self, number: int) -> None:
        """SIGKILL; a run that has come to its end already does not count."""
        run = self._runs[number]
        workers = processes_of(run.pid)
        run.kill()
        self.kills += run.wait() == -signal.SIGKILL
        _wait_until_gone(workers)


def _reported(events: Path) -> Iterator[tuple[str, str, str, str]]:
    """(digest, point, batch, arm) of the rows that runs said they have stored."""
    digest = ""
    for line in events.read_text().splitlines() if events.exists() else ():
        event = json.loads(line)
        if event["event"] == "start":
            digest = event["key"]["digest"]
        elif event["event"] == "batch":
            for row in event["rows"]:
                yield digest, event["point"], event["batch"], row["arm"]


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


def main() -> None:
    """Say how it went on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=int)
    parser.add_argument("--writers", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if given.writers > 1:
            crowd = Crowd(Path(directory), given.writers, seed=given.times)
            crowd.kill(given.times)
            sys.stdout.write(
                f"{crowd.kills} kills of {given.writers} writers, {crowd.check()} rows reported: "
                "none lost, none twice, integrity ok\n"
            )
            return
        trial = Trial(Path(directory), seed=given.times)
        trial.kill(given.times)
    sys.stdout.write(
        f"{trial.kills} kills, {trial.finished} databases complete and equal to an undisturbed "
        "one, nothing lost, integrity ok, no worker left\n"
    )


if __name__ == "__main__":
    main()
