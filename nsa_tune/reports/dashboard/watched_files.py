"""The files that a dashboard shows: their tables, and the runs that are going on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from nsa_tune._errors import NsaTuneError
from nsa_tune.backend.baselines import DEFAULT_BASELINE
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Table
from nsa_tune.db.connection import DAMAGE
from nsa_tune.db.reader import tables_in
from nsa_tune.db.runs import Run, newest_of, runs_of, state_of
from nsa_tune.reports.analysis.report import Report, Section, build

SCHEMA = "nsa-tune/live/1"
NO_REPORT = (NsaTuneError, *DAMAGE)
"""What a report may raise for a faulty table. Only that table is left out."""
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
        self._sections: dict[tuple[object, ...], Section | str] = {}
        """By table, or why it has none."""
        self._broken: dict[str, str] = {}
        """Why a table has no section, by its source."""
        self._lock = Lock()

    @property
    def state(self) -> str:
        """A hash that changes whenever the page would."""
        states = [(str(path), _state(path)) for path in self.paths]
        return hashlib.sha256(repr(states).encode()).hexdigest()[:16]

    def tables(self) -> list[Table]:
        """The tables of all readable files, in the order of the paths."""
        with self._lock:
            return [table for path in self.paths for table in self._look(path).tables]

    def report(self) -> Report:
        """The report over `tables`. Sections of unchanged tables are reused. A table that no report
        can be made of is left out; `live` says why."""
        tables = self.tables()
        with self._lock:
            sections: dict[tuple[object, ...], Section | str] = {}
            self._broken = {}
            for table in tables:
                place = (table.source, table.key, table.measured_at, len(table.measurements))
                cached = self._sections.get(place)
                section = self._section(table) if cached is None else cached
                if isinstance(section, str):
                    self._broken[table.source] = section
                sections[place] = section
            self._sections = sections
            whole = (section for section in sections.values() if isinstance(section, Section))
            return Report(tuple(whole), DEFAULT_BASELINE.name)

    def live(self) -> dict[str, Any]:
        """Runs, newest measurements, failures and problems of each file.

        It only changes when something is stored.
        """
        databases = [self._live(path) for path in self.paths]
        if len(databases) == 1 and not self.paths[0].exists():
            databases[0]["problem"] = ""  # the page says that nothing is measured yet
        return {"schema": SCHEMA, "state": self.state, "databases": databases}

    def _section(self, table: Table) -> Section | str:
        try:
            (section,) = build([table]).sections
        except NO_REPORT as error:
            return f"there is no report of {table.key.digest}: {type(error).__name__}: {error}"
        return section

    # --- one path

    def _look(self, path: Path) -> _Seen:
        state = _state(path)
        seen = self._seen.get(path)
        if seen is None or seen.state != state:
            seen = self._seen[path] = _read(path, state)
        return seen

    def _live(self, path: Path) -> dict[str, Any]:
        with self._lock:
            seen = self._look(path)
        live: dict[str, Any] = {
            "name": path.name, "problem": seen.problem, "runs": [],
            "newest": [], "failures": [],
        }  # fmt: skip
        if seen.problem:
            return live
        live["problem"] = self._broken.get(str(path), "")
        if path.suffix == ".tsv":
            return live
        try:
            live["runs"] = [_of_run(run, seen.tables) for run in runs_of(path, _RUNS)]
            live["newest"] = [asdict(row) for row in newest_of(path, _NEWEST)]
            live["failures"] = [asdict(row) for row in newest_of(path, _FAILURES, failed=True)]
        except NO_REPORT as error:
            live["problem"] = _without_directories(error, path)
        return live


def _of_run(run: Run, tables: Sequence[Table]) -> dict[str, Any]:
    key = next((table.key for table in tables if table.key.digest == run.digest), None)
    what = "" if key is None else f"{key.model}, {key.heads} local heads, {key.kv_layout}"
    return {**asdict(run), "gpu": "" if key is None else key.gpu, "what": what}


def _state(path: Path) -> object:
    """What changes whenever the file does; the error's text if it cannot be read."""
    try:
        stat = path.stat()
        if path.suffix == ".tsv":
            return stat.st_mtime_ns, stat.st_size
        return state_of(path)
    except OSError as error:
        return f"there is no {path.name}: {error.strerror}"
    except NsaTuneError as error:
        return _without_directories(error, path)


def _read(path: Path, state: object) -> _Seen:
    try:
        return _Seen(state, tuple(_readable(tables_in(path))), "")
    except NO_REPORT as error:
        return _Seen(state, (), _without_directories(error, path))


def _without_directories(error: Exception, path: Path) -> str:
    """The error's text without the file's directories, which visitors should not see."""
    return str(error).replace(str(path), path.name) or type(error).__name__


def _readable(tables: Iterable[Table]) -> Iterable[Table]:
    """The tables that this version can make a report of."""
    for table in tables:
        try:
            Setting.of(table)
        except NO_REPORT:
            continue
        yield table
