"""Jobs: what is to be measured, by whom it was taken, and how it ended.

    proposed -> queued -> running -> done, failed
        `----------`----------`----> cancelled

A worker that takes a job says every few seconds that it still works ("beats"). One that is silent
for a lease loses its job to the next worker that asks, unless it comes back before that.

What a token may propose is limited, and what nobody asks for any longer is forgotten: proposals
after two weeks, workers after one, ended jobs when ten thousand newer ones are there. A time that
is to come, as after a clock was set back, counts as long past.
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
_MOST_PROPOSED, _MOST_PROPOSED_BY_TOKEN = 1000, 100
"""Jobs that wait and were not added by an admin."""
_MOST_ENDED, _MOST_WORKERS = 10_000, 10_000
_DAY_S = _AGAIN_S = 86_400.0
"""What ended is not proposed again within this time: who asks may ask every minute."""
_PROPOSAL_S, _WORKER_S = 14 * _DAY_S, 7 * _DAY_S
_ADDED = "somebody added it"
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
            TooManyJobs: when this token, or all together, have too many that wait.
        """
        with self._state.writing() as connection:
            self._forget_proposals(connection)
            newest = self._newest(connection, target, digest)
            if newest is not None and self._serves(newest, points):
                return self._asked_again(connection, newest, points)
            state = "queued" if self._approve else "proposed"
            self._check_quota(connection, by)
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
        """A new job that need not be approved."""
        with self._state.writing() as connection:
            return self._insert(
                connection, target, "queued", _ADDED, by, points, budget_s, fresh, None
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

    def cancel_proposals(self, by: str) -> int:
        """End all that wait of what the token `by` proposed; how many."""
        with self._state.writing() as connection:
            return connection.execute(
                "UPDATE jobs SET state = 'cancelled', ended = ? WHERE created_by = ? "
                "AND state IN ('proposed', 'queued') AND reason <> ?",
                [self._clock(), by, _ADDED],
            ).rowcount

    # --- out

    def claim(self, worker: Worker, claim: str) -> Job | None:
        """The oldest queued job that `worker` can do, which is its own from now on.

        `claim` is what the worker made up for this one job. Asked again with the same, because the
        answer was lost, it gets the same job.
        """
        now = self._clock()
        with self._state.writing() as connection:
            _remember(connection, worker, now)
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
                "UPDATE jobs SET state = 'running', claim = ?, worker = ?, beat = ?, started = ?, "
                "batches = 0, batches_done = 0, attempts = attempts + 1 WHERE id = ?",
                [claim, worker.name, now, now, row["id"]],
            )
            return self._job(connection, row["id"])

    def beat(self, number: int, claim: str, rows: int, done: int = 0, batches: int = 0) -> Job:
        """Note that the worker is at it, has made so many measurements, and has done so many of the
        batches of its sweep.

        Raises:
            JobLost: when it is no longer its job.
        """
        with self._state.writing() as connection:
            self._check_claim(connection, number, claim)
            connection.execute(
                "UPDATE jobs SET state = 'running', beat = ?, rows = ?, batches_done = ?, "
                "batches = ? WHERE id = ?",
                [self._clock(), rows, done, batches, number],
            )
            return self._job(connection, number)

    def end(self, number: int, claim: str, state: str, rows: int, message: str = "") -> Job:
        """End the job: `state` is "done", after its rows have been pushed, or "failed" where its
        worker could not do it. Said twice, it counts once.

        Raises:
            JobLost: when it is no longer its job.
        """
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
        """The newest jobs, the newest first; with `state`, those in it. One whose worker is silent
        counts as running until another worker asks."""
        with self._state.reading() as connection:
            rows = connection.execute(
                "SELECT * FROM jobs WHERE ? IN ('', state) ORDER BY id DESC LIMIT ?", [state, most]
            ).fetchall()
        return [Job.of(row) for row in rows]

    def counts(self) -> dict[str, int]:
        """By state."""
        with self._state.reading() as connection:
            return dict(connection.execute("SELECT state, count(*) FROM jobs GROUP BY state"))

    def workers(self, most: int = 200) -> list[tuple[Worker, float]]:
        """Who has asked for a job within a week, and when last (seconds since 1970), the last one
        first."""
        with self._state.reading() as connection:
            rows = connection.execute(
                "SELECT * FROM workers ORDER BY seen DESC, name LIMIT ?", [most]
            ).fetchall()
        return [(_worker_of(row), row["seen"]) for row in rows]

    def worker(self, name: str) -> Worker | None:
        """The worker of that name as it last asked; None for a new one."""
        with self._state.reading() as connection:
            row = connection.execute("SELECT * FROM workers WHERE name = ?", [name]).fetchone()
        return None if row is None else _worker_of(row)

    def worker_count(self) -> int:
        """How many have asked for a job within a week."""
        with self._state.reading() as connection:
            (count,) = connection.execute("SELECT count(*) FROM workers").fetchone()
        return int(count)

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
        return row["ended"] is None or 0 <= self._clock() - row["ended"] < _AGAIN_S

    def _asked_again(
        self, connection: sqlite3.Connection, row: sqlite3.Row, points: Sequence[str]
    ) -> Job:
        all_points = json.loads(row["points"])
        if row["state"] in _WAITING and all_points:
            all_points = sorted({*all_points, *points}) if points else []
        connection.execute(
            "UPDATE jobs SET asked = asked + 1, asked_last = ?, points = ? WHERE id = ?",
            [self._clock(), json.dumps(all_points), row["id"]],
        )
        return self._job(connection, row["id"])

    def _insert(
        self, connection: sqlite3.Connection, target: Target, state: str, reason: str, by: str,
        points: Sequence[str], budget_s: float | None, fresh: bool, digest: str | None,
    ) -> Job:  # fmt: skip
        cursor = connection.execute(
            "INSERT INTO jobs (state, reason, gpu, model, heads, kv_layout, driver, libraries, "
            "points, fresh, budget_s, digest, created_at, created_by, asked_last) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                state, reason, *target.name, target.driver, target.libraries_text,
                json.dumps(sorted(set(points))), fresh, budget_s, digest,
                datetime.now(UTC).isoformat(timespec="seconds"), by, self._clock(),
            ],
        )  # fmt: skip
        connection.execute(
            f"DELETE FROM jobs WHERE state NOT IN {_OPEN} AND id <= ?",
            [(cursor.lastrowid or 0) - _MOST_ENDED],
        )
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
            "WHERE state = 'running' AND beat NOT BETWEEN ? AND ?",
            [_MOST_ATTEMPTS, _MOST_ATTEMPTS, now, now - self.lease_s, now + self.lease_s],
        )

    def _forget_proposals(self, connection: sqlite3.Connection) -> None:
        now = self._clock()
        connection.execute(
            "UPDATE jobs SET state = 'cancelled', ended = ?, "
            "message = 'nobody asked for it again for two weeks' "
            "WHERE state = 'proposed' AND asked_last NOT BETWEEN ? AND ?",
            [now, now - _PROPOSAL_S, now + _DAY_S],
        )

    def _check_quota(self, connection: sqlite3.Connection, by: str) -> None:
        waiting = "SELECT count(*) FROM jobs WHERE state IN ('proposed', 'queued') AND reason <> ?"
        (count,) = connection.execute(waiting, [_ADDED]).fetchone()
        (own,) = connection.execute(f"{waiting} AND created_by = ?", [_ADDED, by]).fetchone()
        if own >= _MOST_PROPOSED_BY_TOKEN:
            raise TooManyJobs(
                f"{own} jobs that token {by} proposed wait already; an admin may approve them, or "
                f"`nsa-tune job cancel --by {by}`"
            )
        if count >= _MOST_PROPOSED:
            raise TooManyJobs(f"{count} proposed jobs wait already; approve or cancel some first")

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


def _remember(connection: sqlite3.Connection, worker: Worker, now: float) -> None:
    """Note that `worker` has asked, and forget who has not for long."""
    connection.execute(
        "DELETE FROM workers WHERE seen NOT BETWEEN ? AND ?", [now - _WORKER_S, now + _DAY_S]
    )
    connection.execute(
        "INSERT OR REPLACE INTO workers VALUES (?, ?, ?, ?, ?)",
        [worker.name, worker.gpu, worker.driver, libraries_text(worker.libraries), now],
    )
    connection.execute(
        "DELETE FROM workers WHERE name IN "
        "(SELECT name FROM workers ORDER BY seen DESC LIMIT -1 OFFSET ?)",
        [_MOST_WORKERS],
    )


def _worker_of(row: sqlite3.Row) -> Worker:
    libraries = tuple(sorted(json.loads(row["libraries"]).items()))
    return Worker(row["name"], row["gpu"], row["driver"], libraries)


def _settle(connection: sqlite3.Connection, job: Job, now: float) -> None:
    """Believe the table again whose points `job` has measured anew."""
    points = job.points
    marks = ", ".join("?" * len(points))
    connection.execute(
        "UPDATE findings SET settled = ? WHERE settled IS NULL AND digest = ?"
        + (f" AND point IN ({marks})" if points else ""),
        [now, job.digest, *points],
    )
