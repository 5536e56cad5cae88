"""Quarantine: arms that failed so often that a run does not try them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from nsa_tune.autotune.bench.failures import out_of_memory
from nsa_tune.backend.types.records import Measurement, Status

_MOST_FAILURES = 3
_Arm: TypeAlias = tuple[str, str]
"""Point and arm."""
_Batch: TypeAlias = tuple[str, str]
"""Point and batch."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An arm that is no longer tried under this key."""

    point: str
    arm: str
    reason: str
    """Of its latest failure."""


class Quarantine:
    """Counts the failures of each arm of each point.

    An arm is quarantined when it has taken down three workers of a run, or has failed three times
    without one success. An arm that works on some batches and raises on others is not: trying it
    costs next to nothing. A failure does not count where no arm of the batch succeeds, which is the
    fault of its inputs or of the machine, nor where memory ran out, which is a matter of size.
    """

    def __init__(self, stored: Iterable[Measurement] = ()) -> None:
        self._failures: Counter[_Arm] = Counter()
        self._kills: Counter[_Arm] = Counter()
        self._succeeded: set[_Arm] = set()
        self._measurable: set[_Batch] = set()
        """Batches on which an arm has succeeded."""
        self._pending: dict[_Batch, list[Measurement]] = {}
        """Failures on the other batches."""
        self._quarantined: dict[_Arm, Quarantined] = {}
        self.note(stored)

    def note(self, rows: Iterable[Measurement], killed_by: str = "") -> list[Quarantined]:
        """Count `rows`; returns the arms that they put into quarantine.

        Args:
            killed_by: the arm, one of the rows', that took a worker down; empty if none did.
        """
        before = len(self._quarantined)
        for row in rows:
            batch = row.point, row.batch
            if row.status is Status.OK:
                self._succeeded.add((row.point, row.arm))
                self._measurable.add(batch)
                for failure in self._pending.pop(batch, ()):
                    self._count(failure)
            elif not out_of_memory(row):
                self._kills[row.point, row.arm] += row.arm == killed_by
                if batch in self._measurable or row.arm == killed_by:
                    self._count(row)
                else:
                    self._pending.setdefault(batch, []).append(row)
        return list(self._quarantined.values())[before:]

    def _count(self, failure: Measurement) -> None:
        arm = failure.point, failure.arm
        self._failures[arm] += 1
        hopeless = self._failures[arm] >= _MOST_FAILURES and arm not in self._succeeded
        if hopeless or self._kills[arm] >= _MOST_FAILURES:
            self._quarantined.setdefault(arm, Quarantined(*arm, failure.reason))

    def holds(self, point: str, arm: str) -> bool:
        """Whether `arm` of `point` is in quarantine."""
        return (point, arm) in self._quarantined

    @property
    def arms(self) -> tuple[Quarantined, ...]:
        """All arms in quarantine, in the order in which they got there."""
        return tuple(self._quarantined.values())
