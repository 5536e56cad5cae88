"""Weights of batches: how often engines ran which, summed over the decision logs they sent."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from nsa_tune._errors import UsageError
from nsa_tune.backend.types.profiles import PROFILES
from nsa_tune.engines.decision_log import SCHEMA, read_decisions
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.state import State

_MOST_BATCHES = 4096
"""Of one table; the rarest are forgotten."""
_MOST_TABLES = 1024
_MOST_LOGS = 100_000
_MOST_COUNT = 2**53
_LONGEST = 1000
"""Characters of a batch or a name."""


class Counted(NamedTuple):
    """What a log held that was new."""

    decisions: int
    batches: int


class BatchWeights:
    """The weights in a state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def add(self, log: bytes) -> Counted:
        """Count the decisions of `log`; of one that was sent before, only what came behind.

        Raises:
            UsageError: when no line of it is a decision.
        """
        whole = log[: log.rfind(b"\n") + 1]
        if not whole:
            raise UsageError("that is no decision log: it has no whole line")
        first = hashlib.sha256(whole[: whole.index(b"\n")]).hexdigest()
        content = hashlib.sha256(whole).hexdigest()
        with self._state.writing() as connection:
            new = whole[_known_bytes(connection, first, whole) :]
            decisions, counts = _counts(new)
            if not decisions and len(new) == len(whole):
                raise UsageError(f"that is no decision log: no line of it is a {SCHEMA}")
            for key, count in counts.items():
                connection.execute(
                    "INSERT INTO weights VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
                    "SET count = min(count + excluded.count, ?)",
                    [*key, min(count, _MOST_COUNT), _MOST_COUNT],
                )
            if new:
                _forget(connection, {key[:-1] for key in counts})
                connection.execute(
                    "INSERT OR REPLACE INTO logs (first, length, content) VALUES (?, ?, ?)",
                    [first, len(whole), content],
                )
        return Counted(decisions, len(counts))

    def log_for(self, target: Target) -> bytes:
        """The weights of a table as a decision log, the most frequent batch first: what
        `nsa-tune run --trace` reads. Empty where nothing is known."""
        with self._state.reading() as connection:
            rows = connection.execute(
                "SELECT batch, count FROM weights WHERE gpu = ? AND model = ? AND heads = ? "
                "AND kv_layout = ? ORDER BY count DESC, batch",
                [*target.name],
            ).fetchall()
        head = dict(zip(("gpu", "model", "heads", "kv_layout"), target.name, strict=True))
        lines = [
            json.dumps({"schema": SCHEMA, "time": 0, **head, "count": count, "batch": batch,
                        "own": {}, "taken": {}})
            for batch, count in rows
        ]  # fmt: skip
        return "".join(f"{line}\n" for line in lines).encode()


def _known_bytes(connection: sqlite3.Connection, first: str, whole: bytes) -> int:
    """How much of the log was counted before. Its first line has a time, a process and a batch, so
    it tells logs apart; and engines only add to the end of one."""
    row = connection.execute("SELECT length, content FROM logs WHERE first = ?", [first]).fetchone()
    if row is None:
        return 0
    length, content = row
    if length >= len(whole):
        return len(whole)
    return length if hashlib.sha256(whole[:length]).hexdigest() == content else 0


def _counts(log: bytes) -> tuple[int, Counter[tuple[str, str, int, str, str]]]:
    """How many decisions there are; and by table and batch how often it was decided, without
    batches that have no lengths: they cannot be measured."""
    decisions = 0
    counts: Counter[tuple[str, str, int, str, str]] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "decisions.jsonl")
        path.write_bytes(log)
        for one in read_decisions(path):
            decisions += one.count
            word = str(one.batch)
            texts = one.gpu, one.kv_layout, word
            profile = PROFILES.get(one.model)
            known = profile is not None and 1 <= one.heads <= profile.heads
            measurable = known and one.batch.lens is not None
            if measurable and all(len(text) <= _LONGEST and text.isprintable() for text in texts):
                counts[one.gpu, one.model, one.heads, one.kv_layout, word] += one.count
    return decisions, counts


def _forget(connection: sqlite3.Connection, tables: set[tuple[str, str, int, str]]) -> None:
    """Keep what is stored within bounds."""
    (count,) = connection.execute(
        "SELECT count(*) FROM (SELECT DISTINCT gpu, model, heads, kv_layout FROM weights)"
    ).fetchone()
    if count > _MOST_TABLES:
        raise UsageError(f"there are weights of {_MOST_TABLES} tables already")
    for table in sorted(tables):
        connection.execute(
            "DELETE FROM weights WHERE gpu = ?1 AND model = ?2 AND heads = ?3 AND kv_layout = ?4 "
            "AND batch IN (SELECT batch FROM weights WHERE gpu = ?1 AND model = ?2 AND heads = ?3 "
            f"AND kv_layout = ?4 ORDER BY count DESC, batch LIMIT -1 OFFSET {_MOST_BATCHES})",
            table,
        )
    connection.execute("DELETE FROM logs WHERE id <= (SELECT max(id) FROM logs) - ?", [_MOST_LOGS])
