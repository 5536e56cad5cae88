"""Cells: for one measured batch and question, each choice's time and what was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nsa_tune.backend.costmodel.regret import slowdown
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Question
from nsa_tune.backend.types.records import Measurement
from nsa_tune.reports.analysis.cached_policy import CachedPolicy


@dataclass(frozen=True, slots=True)
class Time:
    """The measured time of a choice, which is that of its fastest allowed arm."""

    arm: str
    latency_us: float
    low_us: float
    high_us: float
    samples: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One question on one measured batch."""

    batch: Batch
    word: str
    """`str(batch)`, kept because it is slow for a batch of many sequences."""
    times: Mapping[str, Time]
    """Time by choice, fastest first. Choices without a measured arm are absent."""
    forbidden: Mapping[str, str]
    """Choice to the guard that forbids it. Choices without an arm for this device are absent."""
    choice: str | None
    """What the table's policy takes; None where every choice is forbidden."""
    verdict: str
    default: str
    """What the engine's baseline takes."""

    @property
    def is_sure(self) -> bool:
        """Whether no other choice can be faster."""
        return self.verdict in (Verdict.WIN, Verdict.ONLY)

    @property
    def best(self) -> str | None:
        """The fastest choice; None when no allowed choice was measured."""
        return next(iter(self.times), None)

    @property
    def margin(self) -> float | None:
        """Time of the second fastest choice over the fastest one's; None with fewer than two."""
        ordered = list(self.times.values())
        return ordered[1].latency_us / ordered[0].latency_us if len(ordered) > 1 else None

    def cost(self, choice: str | None) -> float | None:
        """Time of `choice` over the fastest one's, so 1 for the fastest; None if not measured."""
        if choice is None or choice not in self.times:
            return None
        return slowdown({name: time.latency_us for name, time in self.times.items()}, choice)


def cells_of(
    question: Question,
    policy: CachedPolicy,
    batches: Mapping[str, Batch],
    measured: Mapping[str, Mapping[str, Measurement]],
) -> list[Cell]:
    """The cells of `question`, one for each of `batches` and in that order.

    `batches` are keyed by their text; `measured` has each text's successful measurements by arm.
    """
    return [_cell(question, policy, word, batch, measured[word]) for word, batch in batches.items()]


def _cell(
    question: Question,
    policy: CachedPolicy,
    word: str,
    batch: Batch,
    rows: Mapping[str, Measurement],
) -> Cell:
    decision = policy.decide(question, batch)
    allowed = policy.survey(batch).latencies
    runnable = {arm.name for arm in policy.candidates}
    times = {
        choice: min((_time(rows[arm]) for arm in arms if arm in rows and arm in allowed),
                    key=lambda time: time.latency_us, default=None)
        for choice, arms in question.choices.items()
    }  # fmt: skip
    known = [(choice, time) for choice, time in times.items() if time is not None]
    return Cell(
        batch=batch,
        word=word,
        times=dict(sorted(known, key=lambda pair: pair[1].latency_us)),
        forbidden={
            choice: why
            for choice, why in decision.forbidden.items()
            if runnable.intersection(question.choices[choice])
        },
        choice=decision.choice,
        verdict=str(decision.verdict),
        default=decision.default,
    )


def _time(row: Measurement) -> Time:
    assert row.latency_us is not None
    low, high = row.low_us or row.latency_us, row.high_us or row.latency_us
    return Time(row.arm, row.latency_us, low, high, row.samples)
