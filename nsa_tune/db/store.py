"""Store: the tuner's database. What `add` has returned from is on the disk."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Self

from nsa_tune._errors import NoTunedData, StoreCorrupt, StoreMissing, StoreReadOnly
from nsa_tune.backend.types.records import Device, Key, Measurement, Table
from nsa_tune.db.checks import Check
from nsa_tune.db.connection import check_regular_file, damage_errors, schema_version, store_errors
from nsa_tune.db.history import History, Limit, PastRun, order_of
from nsa_tune.db.reader import limits_of, measurement_columns, table_of
from nsa_tune.db.rows import id_of, insert, insert_all
from nsa_tune.db.schema.migrations import migrate
from nsa_tune.db.text_table import checked_measurement

_BUSY_TIMEOUT_S = 30.0
"""How long to wait for another writer; a transaction here takes milliseconds."""
_WHOLLY_CHECKED = 2**26
"""Bytes of a database whose every page is looked at when it is opened: half a second of them."""
_ENDED = (
    "UPDATE runs SET ended_at = coalesce(ended_at, ?), outcome = coalesce(outcome, ?) WHERE id = ?"
)
_ROWS_OF_RUN = "SELECT count(*) FROM measurements WHERE run_id = ?"
_END = "UPDATE runs SET ended_at = ?, outcome = ? WHERE id = ?"
_STORED = (
    f"SELECT measured_at, {measurement_columns()} FROM measurements "
    "JOIN runs ON runs.id = run_id WHERE key_id = ? ORDER BY measurements.id"
)
_LIMITS = (
    "SELECT name, value, past, found_at FROM limits JOIN runs ON runs.id = run_id "
    "WHERE key_id = ? ORDER BY limits.id"
)
_UNIT = """
    INSERT INTO units (run_id, unit, node, batches, ratio) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (run_id, unit) DO UPDATE SET
        node = excluded.node, batches = excluded.batches, ratio = excluded.ratio
"""


@dataclass(frozen=True, slots=True)
class UnitOfRun:
    """What one of the equal devices that shared a run's batches did."""

    unit: str
    """A GPU's UUID, or the name of a CPU."""
    node: str
    """Name of its node in a cluster; empty on the host of the run."""
    batches: int
    """That it measured for the table."""
    ratio: float | None
    """Its time over the other units' on the same batches; None for a single unit."""


class Store(AbstractContextManager["Store"]):
    """An open database. Nothing measured is ever deleted: newer rows count, older ones stay."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path

    @classmethod
    def open(cls, path: Path) -> Self:
        """The database at `path`, made where there is none, for reading and writing, migrated to
        the newest schema.

        Raises:
            StoreReadOnly: when it, or its directory, cannot be written.
            StoreNewer: when a newer nsa-tune wrote it.
            StoreCorrupt: when it is not nsa-tune's, or damaged. It is left as it is.
            StoreError: when it is locked, or the disk is full.
        """
        try:
            check_regular_file(path)
        except StoreMissing:
            _make_directory(path.parent)
        with store_errors(path, writing=True), ExitStack() as opened:
            connection = _connect(path)
            opened.callback(connection.close)
            _check(connection, path)
            _prepare(connection)
            migrate(connection, path)
            opened.pop_all()
        return cls(connection, path)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database; the last one to do so folds the log into the file."""
        self._connection.close()

    def begin_run(self, key: Key, device: Device, arguments: Mapping[str, object]) -> int:
        """The number of a new run that measures under `key` on `device`."""
        with self._writing():
            run = {
                "key_id": self._id_of_key(key),
                "device_id": id_of(self._connection, "devices", asdict(device)),
                "arguments": json.dumps(arguments, default=str, sort_keys=True),
                "started_at": _now(),
            }
            return insert(self._connection, "runs", run)

    def add(
        self, run: int, measurements: Sequence[Measurement], *, units: Sequence[UnitOfRun] = ()
    ) -> None:
        """Store `measurements` of `run`, as taken now, and what its `units` did so far, all or
        none; on the disk when this returns."""
        now = _now()
        rows = [_row(run, now, row) for row in measurements]
        with self._writing():
            insert_all(self._connection, "measurements", rows)
            self._connection.executemany(_UNIT, [(run, *astuple(unit)) for unit in units])

    def rows_of_run(self, run: int) -> int:
        """How many measurements of `run` are stored."""
        with self._reading():
            (count,) = self._connection.execute(_ROWS_OF_RUN, [run]).fetchone()
        return int(count)

    def add_limits(self, run: int, limits: Mapping[str, tuple[int, str]]) -> None:
        """Store the limits that `run` found: name to (value, what happened behind it)."""
        now = _now()
        rows = [
            {"run_id": run, "name": name, "value": value, "past": past, "found_at": now}
            for name, (value, past) in limits.items()
        ]
        with self._writing():
            insert_all(self._connection, "limits", rows)

    def limits(self, key: Key) -> dict[str, int]:
        """The limits that probes found under `key`, the newest of each name."""
        with self._reading():
            number = self._key_number(key)
            return {} if number is None else limits_of(self._connection, number)

    def end_run(self, run: int, outcome: str) -> None:
        """Note how `run` ended: "done", "interrupted" or "budget"."""
        with self._writing():
            self._connection.execute(_END, [_now(), outcome, run])

    def unite(self, history: History) -> int:
        """Add what `history` has and this database has not, all or nothing; how many measurements.

        What then counts for each cell is the newest of both, in whatever order and however often
        histories are added. Of two that were taken at the same time it is the greater by
        `order_of`.

        Raises:
            StoreCorrupt: when the table would be larger than any that is read; nothing is added.
        """
        with self._writing():
            number = self._id_of_key(history.key)
            with damage_errors(self.path):
                newest, limits = self._cells(number), self._limits(number)
            added = 0
            for past in history.runs:
                run = self._id_of_run(number, past)
                rows = [_row(run, at, row) for at, row in past.rows if _counts(newest, at, row)]
                insert_all(self._connection, "measurements", rows)
                new = [limit._asdict() for limit in past.limits if _is_new(limits, limit)]
                insert_all(self._connection, "limits", [{"run_id": run, **row} for row in new])
                added += len(rows)
            try:
                table_of(self._connection, self.path, number, history.key)
            except ValueError as error:
                raise StoreCorrupt(f"the table {history.key.digest} is refused: {error}") from error
        return added

    def _id_of_key(self, key: Key) -> int:
        identity = {
            **{field.name: getattr(key, field.name) for field in fields(key)},
            "libraries": json.dumps(dict(key.libraries)),
            "digest": key.digest,
        }
        return id_of(self._connection, "keys", identity)

    def _id_of_run(self, number: int, past: PastRun) -> int:
        """The run of the key with this `number` that is `past`, put there where it is new."""
        identity: dict[str, object] = {
            "key_id": number,
            "device_id": id_of(self._connection, "devices", asdict(past.device)),
            "arguments": past.arguments,
            "started_at": past.started_at,
        }
        run = id_of(self._connection, "runs", identity)
        # It may have ended since it was added.
        self._connection.execute(_ENDED, [past.ended_at, past.outcome, run])
        return run

    def _cells(self, number: int) -> dict[tuple[str, ...], Measurement]:
        """By cell and time of measurement, what counts of it, under the key with this `number`."""
        cells: dict[tuple[str, ...], Measurement] = {}
        for at, *row in self._connection.execute(_STORED, [number]):
            measurement = checked_measurement(*row)
            cells[_cell(at, measurement)] = measurement
        return cells

    def _limits(self, number: int) -> dict[tuple[str, str], Limit]:
        """By name and time, the limits under the key with this `number`."""
        rows = self._connection.execute(_LIMITS, [number]).fetchall()
        return {(row[0], row[3]): Limit(*row) for row in rows}

    def add_check(self, check: Check) -> None:
        """Keep the outcome of a check; on the disk when this returns."""
        row = {
            "digest": check.digest,
            "driver": check.driver,
            "libraries": json.dumps(dict(check.libraries), sort_keys=True),
            "checked_at": check.checked_at,
            "holds": int(check.holds),
            "drift": check.drift,
            "anchors": json.dumps([asdict(anchor) for anchor in check.anchors]),
        }
        with self._writing():
            insert(self._connection, "checks", row)

    def current(self, key: Key) -> list[Measurement]:
        """The newest measurements under `key` that need not be taken again, oldest first.

        A point's rows from before its latest run with `fresh` are not among them: whether that run
        came to its end or not, what it had not measured yet is still to be measured.
        """
        with self._reading():
            number = self._key_number(key)
            if number is None:
                return []
            since = self._fresh_since(number)
            table = table_of(self._connection, self.path, number, key)
            return [
                row
                for row in sorted(table.measurements, key=table.time_of)
                if table.time_of(row) >= max(since.get(row.point, ""), since[""])
            ]

    def _fresh_since(self, number: int) -> dict[str, str]:
        """When each point's latest fresh run began; "" stands for every point."""
        since = {"": ""}
        query = "SELECT arguments, started_at FROM runs WHERE key_id = ? ORDER BY started_at"
        for text, started_at in self._connection.execute(query, [number]):
            arguments = json.loads(text)
            if isinstance(arguments, dict) and arguments.get("fresh") is True:
                points = arguments.get("points") or [""]
                since.update(dict.fromkeys(points, started_at))
        return since

    def _key_number(self, key: Key) -> int | None:
        row = self._connection.execute(
            "SELECT id FROM keys WHERE digest = ?", [key.digest]
        ).fetchone()
        return None if row is None else int(row[0])

    def table(self, key: Key) -> Table:
        """The newest measurements under `key`; none yet when a run has only begun.

        Raises:
            NoTunedData: when no run of this key ever began.
            StoreCorrupt: when a row is not what nsa-tune writes.
        """
        with self._reading():
            number = self._key_number(key)
            if number is None:
                raise NoTunedData(
                    f"{self.path} has no table for {key.model}, {key.heads} heads, "
                    f"{key.kv_layout} on {key.gpu}; measure one with `nsa-tune run`"
                )
            return table_of(self._connection, self.path, number, key)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with store_errors(self.path), damage_errors(self.path):
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with store_errors(self.path, writing=True), self._connection:
            # IMMEDIATE: a transaction that reads first and writes later is refused at once, without
            # a wait, when another process wrote in between.
            self._connection.execute("BEGIN IMMEDIATE")
            yield


def _row(run: int, at: str, measurement: Measurement) -> dict[str, object]:
    """The row of a measurement that `run` took."""
    return {
        **asdict(measurement),
        "status": str(measurement.status),
        # A reason may quote a path that is no UTF-8.
        "reason": measurement.reason.encode("utf-8", "backslashreplace").decode(),
        "run_id": run,
        "measured_at": at,
    }


def _cell(at: str, row: Measurement) -> tuple[str, ...]:
    return row.point, row.batch, row.arm, at


def _counts(newest: dict[tuple[str, ...], Measurement], at: str, row: Measurement) -> bool:
    """Whether `row` counts more than what is known of its cell at that time; then it is known."""
    cell = _cell(at, row)
    known = newest.get(cell)
    if known is not None and (known == row or order_of(known) >= order_of(row)):
        return False
    newest[cell] = row
    return True


def _is_new(known: dict[tuple[str, str], Limit], limit: Limit) -> bool:
    """The same for a limit."""
    cell = (limit.name, limit.found_at)
    if cell in known and known[cell] >= limit:
        return False
    known[cell] = limit
    return True


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreReadOnly(
            f"{path} cannot be made ({error.strerror}); "
            "give another place for the database with --db or NSA_TUNE_DB"
        ) from error


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path.absolute(), timeout=_BUSY_TIMEOUT_S)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database that is not ours or not whole, before anything in it changes."""
    schema_version(connection, path)
    for name in _tables_to_check(connection, path):
        (verdict,) = connection.execute(f"PRAGMA quick_check({name})").fetchone()
        if verdict != "ok":
            raise StoreCorrupt(
                f"{path} is damaged ({verdict}); move it away, or put a copy of it in its place"
            )


def _tables_to_check(connection: sqlite3.Connection, path: Path) -> list[str]:
    """What `quick_check` takes: all at once, or of a large database each table but that of
    measurements. Its damage is refused where it is read."""
    if path.stat().st_size <= _WHOLLY_CHECKED:
        return ["1"]
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return sorted({f'"{name}"' for (name,) in tables} - {'"measurements"'})


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    # SQLite opens a file that may not be written without a word; only a write shows it.
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE nsa_tune_probe (x)")
    connection.rollback()
    # WAL: readers never wait for the tuner. Where the file system has no shared memory (NFS),
    # SQLite keeps its old journal, which is as safe.
    _use_log(connection)
    # FULL: a commit survives a crash of the machine, which a faulty kernel on a GPU can cause. It
    # costs one fsync a batch, outside of anything timed.
    connection.execute("PRAGMA synchronous = FULL")


def _use_log(connection: sqlite3.Connection) -> None:
    deadline = monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            # Two processes that make one database meet here, where SQLite's own timeout does not
            # hold: the second is refused at once.
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or monotonic() > deadline:
                raise
            sleep(0.01)
        else:
            return


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
