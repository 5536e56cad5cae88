"""Manifests: what a table in a database held when its last run ended, as two digests.

One is of its head: its key, devices, limits and weights, which is all that an engine reads to open
it. The other is of the head and the measurements up to that run. Of thousands of these it takes
ten times as long, so it is checked where measurements are read. Rows that a run adds afterwards are
covered when that run ends. A digest is no signature: it tells that somebody changed the table, and
not who wrote it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable

MANIFESTS_SINCE = 8
"""The schema that has manifests."""
HEADS_SINCE = 9
"""The schema whose manifests have a digest of the head."""

_NEWEST = (
    "SELECT (SELECT coalesce(max(id), 0) FROM measurements), "
    "(SELECT coalesce(max(id), 0) FROM runs), (SELECT coalesce(max(id), 0) FROM limits)"
)
_KNOWN = "SELECT newest_id, newest_run, newest_limit, content FROM manifests WHERE key_id = ?"
_KNOWN_HEAD = "SELECT newest_run, newest_limit, head FROM manifests WHERE key_id = ?"
# Made into one text by SQLite: to fetch every value takes four times as long. One whole number
# stands for a row's times, as how SQLite writes a fraction depends on its version; each of them
# counts to a picosecond, times another prime.
_ROWS = """
    SELECT group_concat(line, char(30)) FROM (
        SELECT point || ' ' || batch || ' ' || arm || ' ' || status || ' ' || samples || ' '
            || measured_at || ' ' || reason || CAST((coalesce(latency_us, 0) * 31
            + coalesce(low_us, 0) * 37 + coalesce(high_us, 0) * 41 + coalesce(pass_us, 0) * 43
            + coalesce(min(error, 1000), 0) * 47) * 1e6 AS INTEGER) AS line
        FROM measurements NOT INDEXED
        WHERE run_id IN (SELECT id FROM runs WHERE key_id = ?) AND id <= ? ORDER BY id
    )
"""
_DEVICES = """
    SELECT runs.id || char(31) || name || char(31) || arch || char(31) || sms || char(31)
        || shared_memory_optin || char(31) || memory || char(31) || l2
    FROM runs JOIN devices ON devices.id = device_id WHERE key_id = ? AND runs.id <= ?
    ORDER BY runs.id
"""
_LIMITS = """
    SELECT name || char(31) || value || char(31) || found_at
    FROM limits JOIN runs ON runs.id = run_id WHERE key_id = ? AND limits.id <= ?
    ORDER BY limits.id
"""
_WEIGHTS = """
    SELECT rows || char(31) || newest_id || char(31) || stamp || char(31) || points || char(31)
        || measured_at FROM weights WHERE key_id = ?
"""


def changed(connection: sqlite3.Connection, number: int, digest: str) -> bool:
    """Whether the table of the key with this `number` and `digest` is not what its manifest says;
    False where it has none."""
    known = connection.execute(_KNOWN, [number]).fetchone()
    return known is not None and _content(connection, number, digest, *known[:3]) != known[3]


def head_changed(connection: sqlite3.Connection, number: int, digest: str) -> bool:
    """The same of all but its measurements."""
    known = connection.execute(_KNOWN_HEAD, [number]).fetchone()
    return known is not None and _head(connection, number, digest, *known[:2]) != known[2]


def seal(connection: sqlite3.Connection, number: int, digest: str) -> None:
    """Write the manifest of what the table holds now, within the caller's transaction.

    One that was changed keeps its old manifest, and goes on being refused.
    """
    if changed(connection, number, digest):
        return
    newest = list(connection.execute(_NEWEST).fetchone())
    content = _content(connection, number, digest, *newest)
    head = _head(connection, number, digest, *newest[1:])
    connection.execute(
        "INSERT OR REPLACE INTO manifests VALUES (?, ?, ?, ?, ?, ?)",
        [number, *newest, content, head],
    )


def _content(
    connection: sqlite3.Connection, number: int, digest: str, newest_id: int, newest_run: int,
    newest_limit: int,
) -> str:  # fmt: skip
    rows = connection.execute(_ROWS, [number, newest_id])
    return _digest(digest, [rows, *_of_head(connection, number, newest_run, newest_limit)])


def _head(
    connection: sqlite3.Connection, number: int, digest: str, newest_run: int, newest_limit: int
) -> str:
    return _digest(digest, _of_head(connection, number, newest_run, newest_limit))


def _of_head(
    connection: sqlite3.Connection, number: int, newest_run: int, newest_limit: int
) -> list[sqlite3.Cursor]:
    return [
        connection.execute(_DEVICES, [number, newest_run]),
        connection.execute(_LIMITS, [number, newest_limit]),
        connection.execute(_WEIGHTS, [number]),
    ]


def _digest(key: str, parts: Iterable[sqlite3.Cursor]) -> str:
    found = hashlib.sha256(key.encode())
    for part in parts:
        lines = [str(line) for (line,) in part]
        found.update(f"\x1e{len(lines)}\x1e".encode())
        found.update("\x1e".join(lines).encode("utf-8", "backslashreplace"))
    return found.hexdigest()[:32]
