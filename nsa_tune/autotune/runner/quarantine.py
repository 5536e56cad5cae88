"""Quarantine: arms that failed so often that a run does not try them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from nsa_tune.autotune.bench.failures import cost_a_worker, failed_before_arms, out_of_memory
from nsa_tune.backend.types.records import Measurement, Status

_MOST_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An arm that is no longer tried under this key."""

    point: str
    arm: str
    reason: str
    """Of its latest failure."""


class Quarantine:
    """Counts the failures of each arm of each point.

    An arm is quarantined when it has taken down three workers, or has failed three times without
    one success. An arm that works on some batches and raises on others is not: trying it costs next
    to nothing. Out of memory is not counted, because it is a matter of the batch's size.
    """

    def __init__(self, known: Iterable[Measurement] = ()) -> None:
        self._failures: Counter[tuple[str, str]] = Counter()
        self._workers: Counter[tuple[str, str]] = Counter()
        self._succeeded: set[tuple[str, str]] = set()
        self._out: dict[tuple[str, str], Quarantined] = {}
        self.note(known)

    def note(self, rows: Iterable[Measurement]) -> list[Quarantined]:
        """Count `rows`; returns the arms that they put into quarantine."""
        new = []
        for row in rows:
            arm = (row.point, row.arm)
            if row.status is Status.OK:
                self._succeeded.add(arm)
            if row.status is Status.OK or out_of_memory(row) or failed_before_arms(row):
                continue
            self._failures[arm] += 1
            self._workers[arm] += cost_a_worker(row)
            hopeless = self._failures[arm] >= _MOST_FAILURES and arm not in self._succeeded
            if arm not in self._out and (hopeless or self._workers[arm] >= _MOST_FAILURES):
                self._out[arm] = Quarantined(row.point, row.arm, row.reason)
                new.append(self._out[arm])
        return new

    def holds(self, point: str, arm: str) -> bool:
        """Whether `arm` of `point` is in quarantine."""
        return (point, arm) in self._out

    @property
    def arms(self) -> tuple[Quarantined, ...]:
        """All arms in quarantine, in the order in which they got there."""
        return tuple(self._out.values())
