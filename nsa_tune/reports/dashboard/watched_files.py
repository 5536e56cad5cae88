"""The files that a dashboard shows: their tables, and the runs that are going on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from nsa_tune._errors import NsaTuneError, UsageError
from nsa_tune.backend.baselines import DEFAULT_BASELINE
from nsa_tune.backend.points import points_for
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Table
from nsa_tune.db import reader as tables
from nsa_tune.db import text_table
from nsa_tune.db.runs import Run, newest_of, places_measured, runs_of, state_of
from nsa_tune.reports.analysis.report import Report, Section, build

__all__ = ["SCHEMA", "WatchedFiles"]

SCHEMA = "nsa-tune/live/1"
_RUNS, _NEWEST, _FAILURES = 5, 8, 8


@dataclass(frozen=True, slots=True)
class _Seen:
    """The content of a file when it was last read."""

    state: object
    """Changes whenever the file does; the error's text if it cannot be read."""
    tables: tuple[Table, ...]
    problem: str


class WatchedFiles:
    """Databases and text tables, read again when they change, and never written."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = tuple(dict.fromkeys(paths))
        self._seen: dict[Path, _Seen] = {}
        self._sections: dict[tuple[object, ...], Section] = {}
        self._expected: dict[tuple[object, ...], int] = {}
        self._lock = Lock()

    @property
    def state(self) -> str:
        """A hash that changes whenever the page would."""
        states = [(str(path), self._state(path)) for path in self.paths]
        return hashlib.sha256(repr(states).encode()).hexdigest()[:16]

    def tables(self) -> list[Table]:
        """The tables of all readable files, in the order of the paths."""
        with self._lock:
            return [table for path in self.paths for table in self._look(path).tables]

    def report(self) -> Report:
        """The report over `tables`. Sections of unchanged tables are reused."""
        found = self.tables()
        with self._lock:
            keys = [(table.source, table.key, table.measured_at, len(table.measurements))
                    for table in found]  # fmt: skip
            for key, table in zip(keys, found, strict=True):
                if key not in self._sections:
                    (self._sections[key],) = self._built(table)
            self._sections = {key: self._sections[key] for key in keys}
            return Report(tuple(self._sections[key] for key in keys), DEFAULT_BASELINE.name)

    def live(self) -> dict[str, Any]:
        """Runs, newest measurements, failures and problems of each file.

        It only changes when something is stored.
        """
        databases = [self._live(path) for path in self.paths]
        return {"schema": SCHEMA, "state": self.state, "databases": databases}

    def _built(self, table: Table) -> Sequence[Section]:
        return build([table]).sections

    # --- one path

    def _state(self, path: Path) -> object:
        try:
            if path.suffix == ".tsv":
                stat = path.stat()
                return stat.st_mtime_ns, stat.st_size
            return state_of(path)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        except NsaTuneError as error:
            return str(error)

    def _look(self, path: Path) -> _Seen:
        state = self._state(path)
        seen = self._seen.get(path)
        if seen is None or seen.state != state:
            seen = self._seen[path] = _read(path, state)
        return seen

    def _live(self, path: Path) -> dict[str, Any]:
        with self._lock:
            seen = self._look(path)
        live: dict[str, Any] = {
            "name": path.name, "path": str(path), "problem": seen.problem, "runs": [],
            "newest": [], "failures": [],
        }  # fmt: skip
        if seen.problem or path.suffix == ".tsv":
            return live
        try:
            live["runs"] = [self._run(path, run, seen.tables) for run in runs_of(path, _RUNS)]
            live["newest"] = [asdict(one) for one in newest_of(path, _NEWEST)]
            live["failures"] = [asdict(one) for one in newest_of(path, _FAILURES, failed=True)]
        except NsaTuneError as error:
            live["problem"] = str(error)
        return live

    def _run(self, path: Path, run: Run, found: Sequence[Table]) -> dict[str, Any]:
        table = next((table for table in found if table.key.digest == run.digest), None)
        expected = done = None
        if table is not None and run.outcome is None:
            points = _points_of(table, run.arguments.get("points") or ())
            expected = self._expectation(table, points)
            done = run.measurements if run.arguments.get("fresh") else (
                places_measured(path, run.digest, [point.name for point in points])
            )  # fmt: skip
        key = None if table is None else table.key
        what = "" if key is None else f"{key.model}, {key.heads} local heads, {key.kv_layout}"
        return {
            **asdict(run), "gpu": "" if key is None else key.gpu, "what": what,
            "expected": expected, "done": done,
        }  # fmt: skip

    def _expectation(self, table: Table, points: Sequence[Point]) -> int:
        """The number of measurements of a full run over `points`."""
        place = (table.key.digest, *(point.name for point in points))
        if place not in self._expected:
            setting = Setting.of(table)
            total = 0
            for point in points:
                arms = list(point.candidates(setting))
                for batch in point.grid(setting):
                    allowed = sum(arm.allowed(batch, setting) is None for arm in arms)
                    # A run skips batches with only one allowed arm.
                    total += allowed if allowed > 1 else 0
            self._expected[place] = total
        return self._expected[place]


def _points_of(table: Table, names: Sequence[str]) -> list[Point]:
    """The points that a run over `names` measures; none if this version does not know them all."""
    try:
        return points_for(profile_of(table.key.model), names)
    except UsageError:
        return []


def _read(path: Path, state: object) -> _Seen:
    try:
        if path.suffix == ".tsv":
            return _Seen(state, (text_table.read_text(path),), "")
        return _Seen(state, tuple(_readable(tables.read_database(path))), "")
    except NsaTuneError as error:
        return _Seen(state, (), str(error))


def _readable(found: Iterable[Table]) -> Iterable[Table]:
    """The tables that this version can make a report of."""
    for table in found:
        try:
            Setting.of(table)
        except NsaTuneError:
            continue
        yield table
