"""Jobs: what is to be measured, by whom it was taken, and how it ended.

    proposed -> queued -> running -> done, failed
        `----------`----------`----> cancelled

A worker that takes a job says every few seconds that it still works ("beats"). One that is silent
for a lease loses its job to the next worker that asks, unless it comes back before that.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from nsa_tune._errors import NoTunedData, NsaTuneError, UsageError
from nsa_tune.fleet.service.jobs.job import Job, Worker
from nsa_tune.fleet.service.jobs.targets import Target, libraries_text
from nsa_tune.fleet.service.state import State

LEASE_S = 120.0
"""How long a worker may be silent."""
_MOST_ATTEMPTS = 3
"""Workers that may go silent over one job."""
_MOST_OPEN = 1000
_AGAIN_S = 86_400.0
"""What ended is not proposed again within this time: who asks may ask every minute."""
_OPEN = "('proposed', 'queued', 'running')"
_WAITING = ("proposed", "queued")
_LONGEST_MESSAGE = 1000


class JobLost(NsaTuneError):
    """The job is no longer this worker's."""


class TooManyJobs(NsaTuneError):
    """No more jobs are taken in."""


class Jobs:
    """The queue in a state. Each method is one transaction; what it returned is on the disk."""

    def __init__(
        self,
        state: State,
        *,
        lease_s: float = LEASE_S,
        approve: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._approve = approve
        self._clock = clock
        self.lease_s = lease_s

    def resume(self) -> None:
        """Give workers that are at work a new lease: they could not beat while nobody listened."""
        with self._state.writing() as connection:
            connection.execute("UPDATE jobs SET beat = ? WHERE state = 'running'", [self._clock()])

    # --- in

    def propose(
        self,
        target: Target,
        reason: str,
        *,
        by: str,
        points: Sequence[str] = (),
        digest: str | None = None,
    ) -> Job:
        """The job for `target`: an open one, one that ended within a day, or a new proposal.

        With the `digest` of a table that no longer holds, it measures that table again.

        Raises:
            TooManyJobs: when a thousand are open.
        """
        with self._state.writing() as connection:
            known = self._newest(connection, target, digest)
            if known is not None and self._serves(known, points):
                return self._asked_again(connection, known, points)
            state = "queued" if self._approve else "proposed"
            return self._insert(
                connection, target, state, reason, by, points, None, digest is not None, digest
            )

    def create(
        self,
        target: Target,
        *,
        by: str,
        points: Sequence[str] = (),
        fresh: bool = False,
        budget_s: float | None = None,
    ) -> Job:
        """A new job that need not be approved.

        Raises:
            TooManyJobs: when a thousand are open.
        """
        reason = "somebody added it"
        with self._state.writing() as connection:
            return self._insert(
                connection, target, "queued", reason, by, points, budget_s, fresh, None
            )

    def approve(self, number: int) -> Job:
        """Queue a proposed job; one that is queued already stays so.

        Raises:
            NoTunedData: when there is no such job.
            UsageError: when it is neither.
        """
        return self._moved(number, "approved", _WAITING, "queued")

    def cancel(self, number: int) -> Job:
        """End a job. A worker that is at it hears of that with its next beat.

        Raises:
            NoTunedData: when there is no such job.
            UsageError: when it has ended.
        """
        return self._moved(number, "cancelled", (*_WAITING, "running"), "cancelled")

    # --- out

    def claim(self, worker: Worker, claim: str) -> Job | None:
        """The oldest queued job that `worker` can do, which is its own from now on.

        `claim` is what the worker made up for this one job. Asked again with the same, because the
        answer was lost, it gets the same job.
        """
        now = self._clock()
        with self._state.writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO workers VALUES (?, ?, ?, ?, ?)",
                [worker.name, worker.gpu, worker.driver, libraries_text(worker.libraries), now],
            )
            row = connection.execute(
                "SELECT * FROM jobs WHERE state = 'running' AND claim = ?", [claim]
            ).fetchone()
            if row is not None:
                return Job.of(row)
            self._take_back(connection, now)
            row = connection.execute(
                "SELECT id FROM jobs WHERE state = 'queued' AND gpu = ? "
                "AND coalesce(driver, ?) = ? AND coalesce(libraries, ?) = ? ORDER BY id LIMIT 1",
                [worker.gpu, worker.driver, worker.driver, *[libraries_text(worker.libraries)] * 2],
            ).fetchone()
            if row is None:
                return None
            connection.execute(
                "UPDATE jobs SET state = 'running', claim = ?, worker = ?, beat = ?, "
                "attempts = attempts + 1 WHERE id = ?",
                [claim, worker.name, now, row["id"]],
            )
            return self._job(connection, row["id"])

    def beat(self, number: int, claim: str, rows: int) -> Job:
        """Note that the worker is at it and has made so many measurements.

        Raises:
            JobLost: when it is no longer its job.
        """
        with self._state.writing() as connection:
            self._check_claim(connection, number, claim)
            connection.execute(
                "UPDATE jobs SET state = 'running', beat = ?, rows = ? WHERE id = ?",
                [self._clock(), rows, number],
            )
            return self._job(connection, number)

    def done(self, number: int, claim: str, rows: int, message: str = "") -> Job:
        """End the job, whose rows have been pushed; said twice, it counts once.

        Raises:
            JobLost: when it is no longer its job.
        """
        return self._ended(number, claim, "done", rows, message)

    def failed(self, number: int, claim: str, rows: int, message: str) -> Job:
        """End the job, which its worker could not do.

        Raises:
            JobLost: when it is no longer its job.
        """
        return self._ended(number, claim, "failed", rows, message)

    def give_back(self, number: int, claim: str) -> Job:
        """Queue the job again: its worker has to stop. It does not count as an attempt.

        Raises:
            JobLost: when it is no longer its job.
        """
        with self._state.writing() as connection:
            self._check_claim(connection, number, claim)
            connection.execute(
                "UPDATE jobs SET state = 'queued', claim = NULL, worker = NULL, beat = NULL, "
                "attempts = max(attempts - 1, 0) WHERE id = ?",
                [number],
            )
            return self._job(connection, number)

    # --- what there is

    def all(self, state: str = "", most: int = 200) -> list[Job]:
        """The newest jobs, the newest first; with `state`, those in it."""
        with self._state.writing() as connection:
            self._take_back(connection, self._clock())
            rows = connection.execute(
                "SELECT * FROM jobs WHERE ? IN ('', state) ORDER BY id DESC LIMIT ?", [state, most]
            ).fetchall()
        return [Job.of(row) for row in rows]

    def counts(self) -> dict[str, int]:
        """By state."""
        with self._state.reading() as connection:
            return dict(connection.execute("SELECT state, count(*) FROM jobs GROUP BY state"))

    def workers(self) -> list[tuple[Worker, float]]:
        """Who has asked for a job, and when last (seconds since 1970)."""
        with self._state.reading() as connection:
            rows = connection.execute("SELECT * FROM workers ORDER BY name").fetchall()
        return [
            (Worker(name, gpu, driver, tuple(sorted(json.loads(libraries).items()))), seen)
            for name, gpu, driver, libraries, seen in rows
        ]

    # --- within a transaction

    def _newest(
        self, connection: sqlite3.Connection, target: Target, digest: str | None
    ) -> sqlite3.Row | None:
        row = connection.execute(
            "SELECT * FROM jobs WHERE gpu = ? AND model = ? AND heads = ? AND kv_layout = ? "
            "AND driver IS ? AND libraries IS ? AND (? IS NULL OR digest = ?) "
            f"ORDER BY state IN {_OPEN} DESC, id DESC LIMIT 1",
            [*target.name, target.driver, target.libraries_text, digest, digest],
        ).fetchone()
        assert row is None or isinstance(row, sqlite3.Row)
        return row

    def _serves(self, row: sqlite3.Row, points: Sequence[str]) -> bool:
        """Whether that job measures `points`, or did so lately."""
        if row["state"] in _WAITING:
            return True
        covered = json.loads(row["points"])
        if covered and not (points and set(points) <= set(covered)):
            return False
        return row["ended"] is None or self._clock() - row["ended"] < _AGAIN_S

    def _asked_again(
        self, connection: sqlite3.Connection, row: sqlite3.Row, points: Sequence[str]
    ) -> Job:
        known = json.loads(row["points"])
        if row["state"] in _WAITING and known:
            known = sorted({*known, *points}) if points else []
        connection.execute(
            "UPDATE jobs SET asked = asked + 1, points = ? WHERE id = ?",
            [json.dumps(known), row["id"]],
        )
        return self._job(connection, row["id"])

    def _insert(
        self, connection: sqlite3.Connection, target: Target, state: str, reason: str, by: str,
        points: Sequence[str], budget_s: float | None, fresh: bool, digest: str | None,
    ) -> Job:  # fmt: skip
        (count,) = connection.execute(
            f"SELECT count(*) FROM jobs WHERE state IN {_OPEN}"
        ).fetchone()
        if count >= _MOST_OPEN:
            raise TooManyJobs(f"{count} jobs are open already; approve or cancel some first")
        cursor = connection.execute(
            "INSERT INTO jobs (state, reason, gpu, model, heads, kv_layout, driver, libraries, "
            "points, fresh, budget_s, digest, created_at, created_by) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                state, reason, *target.name, target.driver, target.libraries_text,
                json.dumps(sorted(set(points))), fresh, budget_s, digest,
                datetime.now(UTC).isoformat(timespec="seconds"), by,
            ],
        )  # fmt: skip
        assert cursor.lastrowid is not None
        return self._job(connection, cursor.lastrowid)

    def _job(self, connection: sqlite3.Connection, number: int) -> Job:
        row = connection.execute("SELECT * FROM jobs WHERE id = ?", [number]).fetchone()
        if row is None:
            raise NoTunedData(f"there is no job {number}")
        return Job.of(row)

    def _moved(self, number: int, word: str, before: tuple[str, ...], after: str) -> Job:
        with self._state.writing() as connection:
            job = self._job(connection, number)
            if job.state not in before:
                raise UsageError(f"job {number} is {job.state} and cannot be {word}")
            ended = self._clock() if after == "cancelled" else None
            connection.execute(
                "UPDATE jobs SET state = ?, ended = ? WHERE id = ?", [after, ended, number]
            )
            return self._job(connection, number)

    def _take_back(self, connection: sqlite3.Connection, now: float) -> None:
        """Queue jobs of silent workers again, or give them up. `claim` stays: until somebody else
        takes the job, the worker may come back to it."""
        connection.execute(
            "UPDATE jobs SET state = CASE WHEN attempts < ? THEN 'queued' ELSE 'failed' END, "
            "ended = CASE WHEN attempts < ? THEN NULL ELSE ? END, "
            "message = 'worker ' || worker || ' went silent' "
            "WHERE state = 'running' AND beat < ?",
            [_MOST_ATTEMPTS, _MOST_ATTEMPTS, now, now - self.lease_s],
        )

    def _check_claim(self, connection: sqlite3.Connection, number: int, claim: str) -> None:
        self._job(connection, number)
        row = connection.execute(
            "SELECT 1 FROM jobs WHERE id = ? AND claim = ? AND state IN ('running', 'queued')",
            [number, claim],
        ).fetchone()
        if row is None:
            raise JobLost(
                f"job {number} is no longer yours: it was cancelled, has ended, or went to another "
                "worker because nothing was heard of you"
            )

    def _ended(self, number: int, claim: str, state: str, rows: int, message: str) -> Job:
        with self._state.writing() as connection:
            row = connection.execute(
                "SELECT state FROM jobs WHERE id = ? AND claim = ?", [number, claim]
            ).fetchone()
            if row is not None and row["state"] == state:
                return self._job(connection, number)
            self._check_claim(connection, number, claim)
            now = self._clock()
            connection.execute(
                "UPDATE jobs SET state = ?, ended = ?, rows = ?, message = ? WHERE id = ?",
                [state, now, rows, message[:_LONGEST_MESSAGE], number],
            )
            job = self._job(connection, number)
            if state == "done":
                _settle(connection, job, now)
            return job


def _settle(connection: sqlite3.Connection, job: Job, now: float) -> None:
    """Believe the table again whose points `job` has measured anew."""
    points = job.points
    marks = ", ".join("?" * len(points))
    connection.execute(
        "UPDATE findings SET settled = ? WHERE settled IS NULL AND digest = ?"
        + (f" AND point IN ({marks})" if points else ""),
        [now, job.digest, *points],
    )
