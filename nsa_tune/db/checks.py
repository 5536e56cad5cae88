"""What `nsa-tune check` found: whether a table still held on a machine, as a database keeps it.

Read with the standard library only, since a dispatcher may ask before it trusts a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nsa_tune._errors import StoreError
from nsa_tune.db.connection import reading
from nsa_tune.db.values import checked, count_of, number_of, text_of

_SINCE = 3
"""The schema that has checks."""
_CHECKS = (
    "SELECT digest, driver, libraries, checked_at, holds, drift, anchors FROM checks "
    "ORDER BY checked_at, id"
)


@dataclass(frozen=True, slots=True)
class Anchor:
    """One batch that was timed again."""

    point: str
    batch: str
    there_us: dict[str, float]
    """By arm, in the table."""
    here_us: dict[str, float]
    """By arm, now; only arms that succeeded."""
    problem: str = ""
    """Why the table does not hold on this batch; empty where it does."""


@dataclass(frozen=True, slots=True)
class Check:
    """Whether one table held on one machine at one time."""

    digest: str
    """Of the table's key."""
    driver: str
    """Of the machine, as `libraries`."""
    libraries: tuple[tuple[str, str], ...]
    checked_at: str
    """ISO 8601, UTC."""
    holds: bool
    drift: float
    """The median over all cells of the time here over the table's, minus one."""
    anchors: tuple[Anchor, ...]

    @property
    def trouble(self) -> str:
        """Why it failed: the first batch that did not hold, or else how far all times moved."""
        for anchor in self.anchors:
            if anchor.problem:
                return f"{anchor.batch}: {anchor.problem}"
        return f"times moved by {self.drift:+.0%}"


def read_checks(path: Path) -> list[Check]:
    """Every check in the database `path`, the oldest first; none in one of an older schema.

    Raises:
        StoreError: when it cannot be read.
    """
    with reading(path) as (connection, version):
        rows = connection.execute(_CHECKS) if version >= _SINCE else ()
        return [Check(*checked(_CHECK, row)) for row in rows]


def _versions(libraries: object) -> tuple[tuple[str, str], ...]:
    versions = json.loads(text_of(libraries))
    return tuple(sorted((name, text_of(version)) for name, version in versions.items()))


def _drift(value: object) -> float:
    number = number_of(value)
    if number is None:
        raise ValueError("a check without a drift")
    return number


def _anchors(anchors: object) -> tuple[Anchor, ...]:
    return tuple(_anchor(**anchor) for anchor in json.loads(text_of(anchors)))


_CHECK = text_of, text_of, _versions, text_of, lambda it: bool(count_of(it)), _drift, _anchors


def _anchor(
    point: object, batch: object, there_us: Mapping[str, object], here_us: Mapping[str, object],
    problem: object = "",
) -> Anchor:  # fmt: skip
    return Anchor(
        text_of(point), text_of(batch), _times(there_us), _times(here_us), text_of(problem)
    )


def _times(by_arm: Mapping[str, object]) -> dict[str, float]:
    if not all(type(time) in (int, float) for time in by_arm.values()):
        raise ValueError("a time that is no number")
    return {arm: float(time) for arm, time in by_arm.items()}  # type: ignore[arg-type]


def failed_checks(
    paths: Iterable[Path], driver: str, libraries: tuple[tuple[str, str], ...]
) -> dict[str, Check]:
    """By digest, the newest check of a table with this driver and these libraries, if it failed."""
    here = driver, tuple(sorted(libraries))
    return {
        check.digest: check
        for check in newest_checks(paths)
        if not check.holds and (check.driver, check.libraries) == here
    }


def newest_checks(paths: Iterable[Path]) -> Iterable[Check]:
    """The newest check of each table with each driver and libraries. Databases that cannot be
    read, and text tables, say nothing."""
    newest: dict[tuple[object, ...], Check] = {}
    for check in _readable(paths):
        place = check.digest, check.driver, check.libraries
        if place not in newest or newest[place].checked_at <= check.checked_at:
            newest[place] = check
    return newest.values()


def _readable(paths: Iterable[Path]) -> Iterator[Check]:
    for path in paths:
        if path.suffix != ".tsv":
            try:
                checks = read_checks(path)
            except StoreError:
                continue
            yield from checks
