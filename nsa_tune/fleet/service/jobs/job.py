"""One job, and the worker that asks for one."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from nsa_tune.fleet.service.jobs.targets import Target, kv_dtype_of

_LAST_S = 2**36
STATES = ("proposed", "queued", "running", "done", "failed", "cancelled")


class Worker(NamedTuple):
    """Who asks for a job, and what it could measure."""

    name: str
    gpu: str
    driver: str
    libraries: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One job."""

    number: int
    state: str
    """"proposed", "queued", "running", "done", "failed" or "cancelled"."""
    reason: str
    """Why it was proposed, in one clause."""
    target: Target
    points: tuple[str, ...]
    """Decision points to measure; none means all."""
    fresh: bool
    """Measure again what is in the table."""
    budget_s: float | None
    digest: str | None
    """Of the key whose table no longer holds, if that is why."""
    created_at: str
    """ISO 8601, UTC."""
    created_by: str
    asked: int
    """How often somebody wanted it."""
    worker: str | None
    attempts: int
    rows: int
    """Measurements that its worker made."""
    message: str
    """What its worker said at the end."""
    started: float | None
    """When its worker took it, in seconds since 1970, as `heard`."""
    heard: float | None
    """When its worker last said that it is at it."""
    batches_done: int
    batches: int
    """Of the sweep that its worker is at; 0 before it has said so."""

    @classmethod
    def of(cls, row: sqlite3.Row) -> Job:
        """The job in a row of the table `jobs`."""
        libraries = None if row["libraries"] is None else json.loads(row["libraries"])
        target = Target(
            row["gpu"], row["model"], row["heads"], row["kv_layout"], row["driver"],
            None if libraries is None else tuple(sorted(libraries.items())),
        )  # fmt: skip
        return cls(
            row["id"], row["state"], row["reason"], target, tuple(json.loads(row["points"])),
            bool(row["fresh"]), row["budget_s"], row["digest"], row["created_at"],
            row["created_by"], row["asked"], row["worker"], row["attempts"], row["rows"],
            row["message"], row["started"], row["beat"], row["batches_done"], row["batches"],
        )  # fmt: skip

    def as_document(self) -> dict[str, Any]:
        """The job as JSON. What its worker chose as proof is not in it."""
        target = self.target
        return {
            "id": self.number, "state": self.state, "reason": self.reason, "gpu": target.gpu,
            "model": target.model, "heads": target.heads, "kv_layout": target.kv_layout,
            "kv_dtype": kv_dtype_of(target.model, target.kv_layout), "driver": target.driver,
            "libraries": None if target.libraries is None else dict(target.libraries),
            "points": list(self.points), "fresh": self.fresh, "budget_s": self.budget_s,
            "created_at": self.created_at, "created_by": self.created_by, "asked": self.asked,
            "worker": self.worker, "attempts": self.attempts, "rows": self.rows,
            "message": self.message, "started_at": _iso(self.started),
            "heard_at": _iso(self.heard), "batches_done": self.batches_done,
            "batches": self.batches,
        }  # fmt: skip


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else at(seconds).isoformat(timespec="seconds")


def at(seconds: float) -> datetime:
    """A time of the service's own database, UTC. A clock that was wrong may have written any."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LAST_S), UTC)
