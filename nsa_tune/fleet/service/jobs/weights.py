"""Weights of batches: how often engines ran which, summed over the decision logs they sent.

When there are too many tables, the token that made most of them known loses the one to which
nothing was added for longest.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from nsa_tune._errors import StoreError, UsageError
from nsa_tune.backend.types.profiles import PROFILES
from nsa_tune.engines.decision_log import SCHEMA, read_decisions
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.state import State

_MOST_BATCHES = 4096
"""Of one table; the rarest are forgotten."""
_MOST_TABLES, _MOST_TABLES_OF_LOG = 1024, 16
_MOST_LOGS = 100_000
_MOST_COUNT, _MOST_ADDED = 2**53, 10_000_000
"""Of one batch, and what one log may add to it: some days of an engine."""
_FIRST_TO_GO = (
    "SELECT gpu, model, heads, kv_layout FROM weighted WHERE sender = "
    "(SELECT sender FROM weighted GROUP BY sender ORDER BY count(*) DESC, sender LIMIT 1) "
    "ORDER BY added, gpu, model, heads, kv_layout LIMIT 1"
)
_OF_TABLE = "gpu = ?1 AND model = ?2 AND heads = ?3 AND kv_layout = ?4"
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

    def add(self, path: Path, by: str) -> Counted:
        """Count the decisions of the log `path`, which the token `by` sent; of one that was sent
        before, only what came behind.

        Raises:
            UsageError: when no line of it is a decision, or it names more tables than engines have.
        """
        log = path.read_bytes()
        whole = memoryview(log)[: log.rfind(b"\n") + 1]
        if not whole:
            raise UsageError("that is no decision log: it has no whole line")
        first = hashlib.sha256(whole[: log.index(b"\n")]).hexdigest()
        content = hashlib.sha256(whole).hexdigest()
        with self._state.reading() as connection:
            known = _known_bytes(connection, first, whole)
        new = whole[known:]
        # Outside of the transaction: it takes seconds.
        decisions, counts = _counts(new)
        if not decisions and not known:
            raise UsageError(f"that is no decision log: no line of it is a {SCHEMA}")
        tables = {key[:-1] for key in counts}
        if len(tables) > _MOST_TABLES_OF_LOG:
            raise UsageError(
                f"the log names {len(tables)} tables; send at most {_MOST_TABLES_OF_LOG} at once"
            )
        with self._state.writing() as connection:
            if _known_bytes(connection, first, whole) != known:
                raise StoreError("this log is being counted already; send it again later")
            for key, count in counts.items():
                connection.execute(
                    "INSERT INTO weights VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
                    "SET count = min(count + excluded.count, ?)",
                    [*key, min(count, _MOST_ADDED, _MOST_COUNT), _MOST_COUNT],
                )
            if new:
                self._remember(connection, tables, by)
                connection.execute(
                    "INSERT OR REPLACE INTO logs (first, length, content) VALUES (?, ?, ?)",
                    [first, len(whole), content],
                )
        return Counted(decisions, len(counts))

    def _remember(
        self, connection: sqlite3.Connection, tables: set[tuple[str, str, int, str]], by: str
    ) -> None:
        """Keep what is stored within bounds, now that something was added to `tables`."""
        for table in sorted(tables):
            connection.execute(
                "INSERT INTO weighted VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET added = excluded.added",
                [*table, by, time.time()],
            )
            connection.execute(
                f"DELETE FROM weights WHERE {_OF_TABLE} AND batch IN (SELECT batch FROM weights "
                f"WHERE {_OF_TABLE} ORDER BY count DESC, batch LIMIT -1 OFFSET {_MOST_BATCHES})",
                table,
            )
        (count,) = connection.execute("SELECT count(*) FROM weighted").fetchone()
        for _ in range(count - _MOST_TABLES):
            _forget(connection, connection.execute(_FIRST_TO_GO).fetchone())
        connection.execute(
            "DELETE FROM logs WHERE id <= (SELECT max(id) FROM logs) - ?", [_MOST_LOGS]
        )

    def forget(self, by: str, gpu: str) -> int:
        """Forget the tables that the token `by` made known, or those of `gpu`; how many. "" stands
        for any, and not for both."""
        with self._state.writing() as connection:
            tables = connection.execute(
                "SELECT gpu, model, heads, kv_layout FROM weighted "
                "WHERE ? IN ('', sender) AND ? IN ('', gpu) AND ? || ? <> ''",
                [by, gpu, by, gpu],
            ).fetchall()
            for table in tables:
                _forget(connection, table)
        return len(tables)

    def version(self, target: Target) -> str:
        """Differs whenever the weights of `target` do; "" where there are none."""
        query = f"SELECT added FROM weighted WHERE {_OF_TABLE}"
        with self._state.reading() as connection:
            row = connection.execute(query, target.name).fetchone()
        return "" if row is None else str(row[0])

    def log_for(self, target: Target) -> bytes:
        """The weights of a table as a decision log, the most frequent batch first: what
        `nsa-tune run --trace` reads. Empty where nothing is known."""
        query = f"SELECT batch, count FROM weights WHERE {_OF_TABLE} ORDER BY count DESC, batch"
        with self._state.reading() as connection:
            rows = connection.execute(query, target.name).fetchall()
        head = dict(zip(("gpu", "model", "heads", "kv_layout"), target.name, strict=True))
        lines = [
            json.dumps({"schema": SCHEMA, "time": 0, **head, "count": count, "batch": batch,
                        "own": {}, "taken": {}})
            for batch, count in rows
        ]  # fmt: skip
        return "".join(f"{line}\n" for line in lines).encode()


def _known_bytes(connection: sqlite3.Connection, first: str, whole: memoryview) -> int:
    """How much of the log was counted before. Its first line has a time, a process and a batch, so
    it tells logs apart; and engines only add to the end of one."""
    row = connection.execute("SELECT length, content FROM logs WHERE first = ?", [first]).fetchone()
    if row is None:
        return 0
    length, content = row
    if length >= len(whole):
        return len(whole)
    return length if hashlib.sha256(whole[:length]).hexdigest() == content else 0


def _counts(log: memoryview) -> tuple[int, Counter[tuple[str, str, int, str, str]]]:
    """How many decisions there are; and by table and batch how often it was decided, without
    batches that have no lengths: they cannot be measured."""
    decisions = 0
    counts: Counter[tuple[str, str, int, str, str]] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "decisions.jsonl")
        path.write_bytes(log)
        for decision in read_decisions(path):
            decisions += decision.count
            word = str(decision.batch)
            texts = decision.gpu, decision.kv_layout, word
            profile = PROFILES.get(decision.model)
            has_heads = profile is not None and 1 <= decision.heads <= profile.heads
            measurable = has_heads and decision.batch.lens is not None
            if measurable and all(len(text) <= _LONGEST and text.isprintable() for text in texts):
                counts[decision.gpu, decision.model, decision.heads, decision.kv_layout, word] += (
                    decision.count
                )
    return decisions, counts


def _forget(connection: sqlite3.Connection, table: sqlite3.Row) -> None:
    for name in ("weights", "weighted"):
        connection.execute(f"DELETE FROM {name} WHERE {_OF_TABLE}", [*table])
