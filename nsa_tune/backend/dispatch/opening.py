"""Opening: which table answers a request, from an exact one down to the engine's baseline."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nsa_tune._errors import NoTunedData, NsaTuneError, StoreError
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.environment import Environment
from nsa_tune.backend.dispatch.fit_check import UNFIT
from nsa_tune.backend.dispatch.matching import (
    Here,
    differing,
    in_order,
    nothing_for,
    of_the_same_architecture,
)
from nsa_tune.backend.dispatch.table_planner import Match, TablePlanner
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.libraries.limits import probed_elsewhere
from nsa_tune.backend.points import POINTS, points_for
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Device, StoredTable, Table
from nsa_tune.db import places, search
from nsa_tune.db import reader as tables
from nsa_tune.db.checks import Check, failed_checks

if TYPE_CHECKING:
    from nsa_tune.backend.baselines import Baseline
    from nsa_tune.remote.fetching import Fetched

_log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """A table that could answer."""

    table: StoredTable
    match: Match
    device: Device
    """The device that will run, which the limits are those of."""
    differences: tuple[str, ...]


_Failed = Mapping[str, Check]
"""Failed checks, by the digest of the table's key."""


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody wants answers for."""

    db: Path | None
    wanted: tables.Wanted
    setting: Setting
    """Without the device's facts and libraries, which a table has."""
    strict: bool
    baseline: Baseline
    demote_failed: bool

    def opened(self) -> TablePlanner:
        """What answers now, prepared, so that no request waits for it.

        Raises:
            UsageError: for a variable NSA_TUNE_... that means nothing.
            NoTunedData: when only an exact table will do, and there is none.
        """
        environment = Environment.read(POINTS, os.environ)
        problems: list[str] = []
        if environment.disabled:
            problems.append("NSA_TUNE_DISABLE is set")
            return self._opened(Here.of(self.wanted.gpu), environment, problems)
        # Here alone a server is asked. Whatever else looks for tables reads the copy.
        asked = places.ask_again(self.wanted)
        if asked is not None and asked.path is None:
            problems.append(asked.sentence)
        try:
            db = None if self.db is None else places.local(self.db, self.wanted, again=True)
        except StoreError as error:
            problems.append(str(error))
            db = None
        here = Here.of(self.wanted.gpu)
        fits = False
        try:
            opened = replace(self, db=db)._opened(here, environment, problems)
            fits = opened.match is Match.EXACT
        finally:
            if environment.ask_for_tables and not fits:
                self._ask_for_table(asked, here)
        return opened

    def _ask_for_table(self, served: Fetched | None, here: Here | None) -> None:
        """Tell the service of NSA_TUNE_DB that no table is of exactly this machine."""
        if served is None or here is None:
            return
        from nsa_tune.remote.wanted import ask_for

        versions = {"driver": here.driver, "libraries": dict(here.libraries)}
        ask_for(served.address, {**self.wanted._asdict(), **versions})

    def _opened(
        self, here: Here | None, environment: Environment, problems: list[str]
    ) -> TablePlanner:
        strict = self.strict or environment.assert_hit
        if not environment.disabled:
            failed = self._failed(here, environment)
            for found in self._candidates(here, strict, failed, problems):
                try:
                    opened = self._tuned(found, here, environment)
                except (NsaTuneError, *UNFIT) as error:
                    problems.append(f"{found.table.head.source} cannot be used: {error}")
                    _log.warning("%s", problems[-1])
                else:
                    return opened
        problem = problems[-1] if problems else nothing_for(self.db, self.wanted)
        if strict:
            asserted = "" if self.strict else " (NSA_TUNE_ASSERT_HIT is set)"
            raise NoTunedData(problem + asserted)
        return self._untuned(problem, here, environment)

    def _failed(self, here: Here | None, environment: Environment) -> _Failed:
        """The tables that are demoted, by digest."""
        if here is None or not (self.demote_failed or environment.demote_failed):
            return {}
        return failed_checks(places.sources(self.db, self.wanted), here.driver, here.libraries)

    def _candidates(
        self, here: Here | None, strict: bool, failed: _Failed, problems: list[str]
    ) -> Iterator[_Found]:
        """The tables that may answer, best first; `problems` gets why others may not."""
        try:
            for table in in_order(self.db, self.wanted, here, failed):
                differences = tuple(_different(table.head, here, failed))
                if strict and differences:
                    problems.append(f"{table.head.source} is stale: {'; '.join(differences)}")
                else:
                    match = Match.STALE if differences else Match.EXACT
                    # By the name that was asked for: that of the device's row is the table's word.
                    claimed = replace(table.head.device, name=self.wanted.gpu)
                    yield _Found(table, match, detect.device_of(claimed), differences)
        except StoreError as error:
            problems.append(str(error))
            _log.warning("%s", error)
        if not strict:
            yield from self._elsewhere()

    def _elsewhere(self) -> Iterator[_Found]:
        device = detect.KNOWN.get(self.wanted.gpu)
        if device is not None:
            for table in of_the_same_architecture(self.db, self.wanted, device.arch):
                difference = f"measured on {table.head.key.gpu}, another GPU of {device.arch}"
                yield _Found(table, Match.ARCHITECTURE, device, (difference,))

    def _tuned(self, found: _Found, here: Here | None, environment: Environment) -> TablePlanner:
        table = found.table.read()
        if not search.succeeded(table):
            raise NoTunedData("no measurement of it succeeded")
        setting = self._setting_of(table, found.device, here)
        planner = self._planner(setting, environment, _source(found), found.match, table)
        if found.match is not Match.EXACT:
            _log.warning("%s", planner.source)
        return planner

    def _setting_of(self, table: Table, device: Device, here: Here | None) -> Setting:
        measured = dict(table.key.libraries)
        libraries = measured if here is None else dict(here.libraries)
        limits = dict(table.limits) if table.key.gpu == self.wanted.gpu else {}
        return replace(
            self.setting, device=device, libraries=libraries, limits=limits,
            limits_elsewhere=probed_elsewhere(limits, measured, libraries),
        )  # fmt: skip

    def _planner(
        self, setting: Setting, environment: Environment, source: str, match: Match,
        table: Table | None,
    ) -> TablePlanner:  # fmt: skip
        rows = () if table is None else table.measurements
        points = points_for(setting.profile, (), POINTS)
        return TablePlanner(
            setting,
            [Policy.fit(point, setting, rows) for point in points],
            source=source,
            match=match,
            baseline=self.baseline,
            table=table,
            forced=environment.forced,
        )

    def _untuned(self, problem: str, here: Here | None, environment: Environment) -> TablePlanner:
        gpu = self.wanted.gpu
        _log.warning("%s chooses by itself: %s", self.baseline.name, problem)
        device = detect.KNOWN.get(gpu) or Device(gpu, "cpu" if gpu == detect.cpu_name() else "")
        libraries = {} if here is None else dict(here.libraries)
        setting = replace(self.setting, device=device, libraries=libraries)
        source = f"the baseline of {self.baseline.name}: {problem}"
        return self._planner(setting, environment, source, Match.BASELINE, None)


def _different(table: Table, here: Here | None, failed: _Failed) -> Iterator[str]:
    yield from differing(table, here)
    check = failed.get(table.key.digest) if failed else None
    if check is not None:
        yield f"failed nsa-tune check here at {check.checked_at} ({check.trouble})"


def _source(found: _Found) -> str:
    table = found.table.head
    text = f"{table.source}, measured {table.measured_at}" if table.measured_at else table.source
    if not found.differences:
        return text
    stale = "stale: " if found.match is Match.STALE else ""
    return f"{text}; {stale}{'; '.join(found.differences)}"
