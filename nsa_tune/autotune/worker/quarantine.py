"""Failures: what their reasons say, and which arms are no longer tried because of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nsa_tune.backend.types.records import Measurement, Status

__all__ = ["Quarantine", "Quarantined", "for_inputs", "held_elsewhere", "out_of_memory",
           "passing", "with_worker"]  # fmt: skip

_MOST = 3
_WORKER = "worker lost: "
_INPUTS = "inputs: "
_ELSEWHERE = "other processes hold"
_SHORT = ("MemoryError:", "OutOfMemoryError:", "out of memory", "can't allocate memory",
          "cannot allocate memory")  # fmt: skip
_LONGEST = 400


def with_worker(row: Measurement) -> Measurement:
    """`row`, whose arm also cost a worker process."""
    return replace(row, reason=f"{_WORKER}{row.reason}"[:_LONGEST])


def for_inputs(row: Measurement) -> Measurement:
    """`row`, which failed before any arm was touched."""
    return replace(row, reason=f"{_INPUTS}{row.reason}"[:_LONGEST])


def held_elsewhere(row: Measurement, bytes_held: int) -> Measurement:
    """`row`, which ran out of memory of which other processes hold `bytes_held`."""
    reason = f"{_ELSEWHERE} {bytes_held / 2**30:.1f} GiB; {row.reason}"
    return replace(row, reason=reason[:_LONGEST])


def out_of_memory(row: Measurement) -> bool:
    """Whether `row` failed because memory was short."""
    return row.status is Status.FAILED and any(
        text.lower() in row.reason.lower() for text in _SHORT
    )


def passing(row: Measurement) -> bool:
    """Whether `row` failed for a reason that a later run need not meet."""
    return row.status is Status.FAILED and row.reason.startswith(_ELSEWHERE)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An arm that is no longer tried under this key."""

    point: str
    arm: str
    reason: str
    """Of its latest failure."""


class Quarantine:
    """Counts failures by arm.

    An arm that cost three workers is out, and one that failed three times and never succeeded. One
    that works for some batches and fails for others stays in: trying it costs next to nothing.
    Memory that ran out speaks of the batch's size and is not counted.
    """

    def __init__(self, known: Iterable[Measurement] = ()) -> None:
        self._failures: Counter[tuple[str, str]] = Counter()
        self._workers: Counter[tuple[str, str]] = Counter()
        self._right: set[tuple[str, str]] = set()
        self._out: dict[tuple[str, str], Quarantined] = {}
        self.note(known)

    def note(self, rows: Iterable[Measurement]) -> list[Quarantined]:
        """Count `rows`; returns the arms that are out from now on."""
        new = []
        for row in rows:
            arm = (row.point, row.arm)
            if row.status is Status.OK:
                self._right.add(arm)
            if row.status is Status.OK or out_of_memory(row) or row.reason.startswith(_INPUTS):
                continue
            self._failures[arm] += 1
            self._workers[arm] += row.reason.startswith(_WORKER)
            hopeless = self._failures[arm] >= _MOST and arm not in self._right
            if arm not in self._out and (hopeless or self._workers[arm] >= _MOST):
                self._out[arm] = Quarantined(row.point, row.arm, row.reason)
                new.append(self._out[arm])
        return new

    def holds(self, point: str, arm: str) -> bool:
        """Whether `arm` is out."""
        return (point, arm) in self._out

    @property
    def arms(self) -> tuple[Quarantined, ...]:
        """All arms that are out, the first one first."""
        return tuple(self._out.values())
