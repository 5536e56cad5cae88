"""Opening: which table answers a request, from an exact one down to the engine's rule."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nsa_tune._errors import NoTunedData, NsaTuneError, StoreError
from nsa_tune.backend.costmodel import artifact as policy_cache
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.environment import Environment
from nsa_tune.backend.dispatch.matching import (
    Here,
    differing,
    in_order,
    nothing_for,
    of_the_same_architecture,
)
from nsa_tune.backend.dispatch.serving import Match, Serving
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.points import POINTS, points_for
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Table
from nsa_tune.db import reader as tables
from nsa_tune.db.checks import Check, failed_checks

if TYPE_CHECKING:
    from nsa_tune.backend.baselines import Rule

__all__ = ["Opened", "Request"]

_log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """What answers, and the measurements behind it."""

    serving: Serving
    read: Callable[[], Table | None]

    @property
    def table(self) -> Table | None:
        """The measurements; None when the engine's rule answers."""
        return self.read()


class _Found(NamedTuple):
    """A table that could answer."""

    table: Table
    match: Match
    device: Device
    """The device that will run, which the limits are those of."""
    differences: tuple[str, ...]
    demoted: bool = False
    """Whether it failed a check here: then nothing about it is kept."""


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
    rule: Rule
    demote_failed: bool = False

    @classmethod
    def of(
        cls, db: str | Path | None, gpu: str | None, model: str, heads: int, kv_dtype: str,
        strict: bool, rule: Rule, demote_failed: bool = False,
    ) -> Request:  # fmt: skip
        """The request of `Dispatcher.open`.

        Raises:
            UsageError: for an unknown model or KV dtype, or heads that do not divide the model's.
        """
        profile = profile_of(model)
        layout = profile.layout(kv_dtype)
        profile.check_heads(heads)
        gpu = detect.local_device_name() if gpu is None else gpu
        return cls(
            None if db is None else Path(db),
            tables.Wanted(gpu, model, heads, str(layout)),
            Setting(profile, heads, layout, Device(gpu, "")),
            strict,
            rule,
            demote_failed,
        )

    def opened(self) -> Opened:
        """What answers now.

        Raises:
            UsageError: for a variable NSA_TUNE_... that means nothing.
            NoTunedData: when only an exact table will do, and there is none.
        """
        environment = Environment.read(POINTS, os.environ)
        here = Here.of(self.wanted.gpu)
        strict = self.strict or environment.assert_hit
        problems = []
        if environment.disabled:
            problems.append("NSA_TUNE_DISABLE is set")
        else:
            failed = self._failed(here, environment)
            kept = _Kept.beside(self, here, failed)
            if kept is not None and (entry := kept.entry()) is not None:
                opened = self._kept(entry, here, strict, environment)
                if opened is not None:
                    return opened
            for found in self._candidates(here, strict, failed, problems):
                try:
                    return self._tuned(found, here, environment, kept)
                except NsaTuneError as error:
                    problems.append(f"{found.table.source} cannot be used: {error}")
        problem = problems[-1] if problems else nothing_for(self.db, self.wanted)
        if strict:
            asserted = "" if self.strict else " (NSA_TUNE_ASSERT_HIT is set)"
            raise NoTunedData(problem + asserted)
        return self._untuned(problem, here, environment)

    def _failed(self, here: Here | None, environment: Environment) -> _Failed:
        """The tables that are demoted, by digest."""
        if here is None or not (self.demote_failed or environment.demote_failed):
            return {}
        return failed_checks(tables.sources(self.db), here.driver, here.libraries)

    def _in_order(self, here: Here | None, failed: _Failed, problems: list[str]) -> Iterator[Table]:
        """The tables of this GPU, best first."""
        demoted: list[Table] = []
        try:
            for found in tables.find_all(self.db, self.wanted):
                for table in in_order(found, here):
                    if table.key.digest not in failed:
                        yield table
                    else:
                        demoted.append(table)
                if not failed:
                    return  # the first source that has any answers
        except StoreError as error:
            problems.append(str(error))
        yield from demoted

    def _candidates(
        self, here: Here | None, strict: bool, failed: _Failed, problems: list[str]
    ) -> Iterator[_Found]:
        """The tables that may answer, best first; `problems` gets why others may not."""
        for table in self._in_order(here, failed, problems):
            differences = tuple(_different(table, here, failed))
            if strict and differences:
                problems.append(f"{table.source} is stale: {'; '.join(differences)}")
            else:
                match = Match.STALE if differences else Match.EXACT
                demoted = table.key.digest in failed
                yield _Found(table, match, table.device, differences, demoted)
        if not strict:
            yield from self._elsewhere()

    def _elsewhere(self) -> Iterator[_Found]:
        device = detect.KNOWN.get(self.wanted.gpu)
        if device is not None:
            for table in of_the_same_architecture(self.db, self.wanted, device.arch):
                difference = f"measured on {table.key.gpu}, another GPU of {device.arch}"
                yield _Found(table, Match.ARCHITECTURE, device, (difference,))

    def _kept(
        self, entry: policy_cache.Entry, here: Here | None, strict: bool, environment: Environment
    ) -> Opened | None:
        """What the kept policies answer; None when they are stale and that will not do."""
        table = Table(entry.key, entry.device, (), entry.source, entry.measured_at, entry.limits)
        differences = tuple(differing(table, here))
        if strict and differences:
            return None
        match = Match.STALE if differences else Match.EXACT
        setting = self._setting_of(table, entry.device, here)
        policies = [
            Policy(POINTS[name], setting, compiled, entry.measurements)
            for name, compiled in entry.compiled.items()
        ]
        found = _Found(table, match, entry.device, differences)
        return Opened(self._serving(found, setting, policies, environment), cache(entry.table))

    def _tuned(
        self, found: _Found, here: Here | None, environment: Environment, kept: _Kept | None
    ) -> Opened:
        table = found.table
        setting = self._setting_of(table, found.device, here)
        policies = [Policy.compile(point, setting, table.measurements) for point in self._points()]
        if kept is not None and found.match is not Match.ARCHITECTURE and not found.demoted:
            kept.keep(table, policies)
        serving = self._serving(found, setting, policies, environment)
        return Opened(serving, lambda: table)

    def _setting_of(self, table: Table, device: Device, here: Here | None) -> Setting:
        libraries = dict(table.key.libraries if here is None else here.libraries)
        limits = dict(table.limits) if table.key.gpu == self.wanted.gpu else {}
        return replace(self.setting, device=device, libraries=libraries, limits=limits)

    def _points(self) -> list[Point]:
        return points_for(self.setting.profile, (), POINTS)

    def _serving(
        self, found: _Found, setting: Setting, policies: list[Policy], environment: Environment
    ) -> Serving:
        serving = Serving(
            setting,
            policies,
            source=_source(found),
            match=found.match,
            rule=self.rule,
            key=found.table.key,
            forced=environment.forced,
        )
        if found.match is not Match.EXACT:
            _log.warning("%s", serving.source)
        return serving

    def _untuned(self, problem: str, here: Here | None, environment: Environment) -> Opened:
        gpu = self.wanted.gpu
        _log.warning("%s answers, without measurements: %s", self.rule.name, problem)
        device = detect.KNOWN.get(gpu) or Device(gpu, "cpu" if gpu == detect.cpu_name() else "")
        libraries = {} if here is None else dict(here.libraries)
        setting = replace(self.setting, device=device, libraries=libraries)
        serving = Serving(
            setting,
            [Policy.compile(point, setting, ()) for point in self._points()],
            source=f"the rule of {self.rule.name}: {problem}",
            match=Match.RULE,
            rule=self.rule,
            forced=environment.forced,
        )
        return Opened(serving, lambda: None)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The compiled policies beside the first source, for one request."""

    database: Path
    file: Path
    content: str

    @classmethod
    def beside(cls, request: Request, here: Here | None, failed: _Failed) -> _Kept | None:
        """Where they are, or would be; None unless the first source is a database."""
        database = next(tables.sources(request.db), None)
        # Nothing is written beside a text table: it may lie in a package or a repository.
        if database is None or database.suffix == ".tsv":
            return None
        content = policy_cache.content_of(database)
        if content is None:
            return None
        asked = (*request.wanted, here, *sorted(failed), *POINTS)
        return cls(database, policy_cache.file_of(database, asked), content)

    def entry(self) -> policy_cache.Entry | None:
        """The kept policies, if they still hold."""
        return policy_cache.load(self.file, self.database, self.content)

    def keep(self, table: Table, policies: list[Policy]) -> None:
        """Keep `policies`, unless the database has changed while it was read."""
        unchanged = policy_cache.content_of(self.database) == self.content
        if unchanged and table.source == str(self.database):
            compiled = {policy.point.name: policy.compiled for policy in policies}
            policy_cache.store(self.file, self.content, table, compiled)


def _different(table: Table, here: Here | None, failed: _Failed) -> Iterator[str]:
    yield from differing(table, here)
    check = failed.get(table.key.digest)
    if check is not None:
        yield f"failed nsa-tune check here at {check.checked_at} ({check.trouble})"


def _source(found: _Found) -> str:
    table = found.table
    text = f"{table.source}, measured {table.measured_at}" if table.measured_at else table.source
    if not found.differences:
        return text
    stale = "stale: " if found.match is Match.STALE else ""
    return f"{text}; {stale}{'; '.join(found.differences)}"
