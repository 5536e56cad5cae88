"""One cell a measured batch and answer: what each choice took, and what was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_tune.backend.types.records import Measurement

if TYPE_CHECKING:
    from nsa_tune.backend.types.batch import Batch
    from nsa_tune.backend.types.point import Answer
    from nsa_tune.reports.content.remembering import Remembering

__all__ = ["Cell", "Time", "cells_of"]


@dataclass(frozen=True, slots=True)
class Time:
    """The measured time of a choice: that of its fastest allowed arm, in microseconds."""

    arm: str
    latency_us: float
    low_us: float
    high_us: float
    samples: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured batch under one answer."""

    point: str
    answer: str
    batch: Batch
    word: str
    """`str(batch)`, which takes long for a big batch."""
    times: Mapping[str, Time]
    """Choice to its time, fastest first; a choice that no arm measured is absent."""
    forbidden: Mapping[str, str]
    """Choice to the guard's clause that rules it out; choices that no arm of this device realises
    are absent."""
    choice: str | None
    """What the table's policy answers; None where every choice is forbidden."""
    verdict: str
    default: str
    """What the engine's own rule answers."""

    @property
    def best(self) -> str | None:
        """The fastest measured choice; None when nothing allowed was measured."""
        return next(iter(self.times), None)

    @property
    def margin(self) -> float | None:
        """Time of the second fastest choice over that of the fastest; None when there is none."""
        ordered = list(self.times.values())
        return ordered[1].latency_us / ordered[0].latency_us if len(ordered) > 1 else None

    def cost(self, choice: str | None) -> float | None:
        """Time of `choice` over that of the best: 1 is the best; None when not measured."""
        if choice is None or choice not in self.times:
            return None
        return self.times[choice].latency_us / min(t.latency_us for t in self.times.values())


def cells_of(
    answer: Answer,
    policy: Remembering,
    batches: Mapping[str, Batch],
    measured: Mapping[str, Mapping[str, Measurement]],
) -> list[Cell]:
    """The cells of `answer` over `batches` (by their words), in their order.

    `measured` has for each word the successful measurements by arm.
    """
    return [_cell(answer, policy, word, batch, measured[word]) for word, batch in batches.items()]


def _cell(
    answer: Answer, policy: Remembering, word: str, batch: Batch, rows: Mapping[str, Measurement]
) -> Cell:
    decision = policy.decide(answer, batch)
    allowed = policy.survey(batch).latencies
    # That no arm of a choice is for this device and layout holds for every cell alike.
    runnable = {arm.name for arm in policy.candidates}
    times = {
        choice: min((_time(rows[arm]) for arm in arms if arm in rows and arm in allowed),
                    key=lambda time: time.latency_us, default=None)
        for choice, arms in answer.choices.items()
    }  # fmt: skip
    known = [(choice, time) for choice, time in times.items() if time is not None]
    return Cell(
        point=policy.point.name,
        answer=answer.name,
        batch=batch,
        word=word,
        times=dict(sorted(known, key=lambda pair: pair[1].latency_us)),
        forbidden={
            choice: why
            for choice, why in decision.forbidden.items()
            if runnable.intersection(answer.choices[choice])
        },
        choice=decision.choice,
        verdict=str(decision.verdict),
        default=decision.default,
    )


def _time(row: Measurement) -> Time:
    assert row.latency_us is not None
    low, high = row.low_us or row.latency_us, row.high_us or row.latency_us
    return Time(row.arm, row.latency_us, low, high, row.samples)
