"""Weighing: what one value of a setting for all batches costs them, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, fsum, hypot, log
from typing import NamedTuple

from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.decide import MARGIN, Verdict
from nsa_tune.backend.types.batch import Batch
from nsa_tune.reports.advice.limits import Advice, Setting

__all__ = ["Cell", "Change", "Settings", "weigh"]

_MOST_LOST = 1.25
"""The most that one batch may become slower by settings that are sure."""


class Settings(NamedTuple):
    """The engine's settings that decide a prefill's path and kernel."""

    impl: str
    threshold: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch with the estimates of what may run on it."""

    batch: Batch
    weight: float
    mha: Estimate | None
    mla: dict[str, Estimate]

    def dense(self, settings: Settings) -> bool:
        """Whether the engine takes MHA with these settings."""
        fits = self.batch.max_kv <= settings.threshold
        return self.mha is not None and fits and self.batch.kv_tokens <= settings.capacity

    def cost(self, settings: Settings) -> Estimate | None:
        """The batch's time with these settings; None where nothing is known of it."""
        return self.mha if self.dense(settings) else self.mla.get(settings.impl)

    @property
    def best(self) -> float:
        """The least time of all that may run."""
        every = [*self.mla.values(), *([self.mha] if self.mha else [])]
        return min(one.latency_us for one in every)


class Change(NamedTuple):
    """One batch before and after."""

    cell: Cell
    before: Estimate
    after: Estimate

    @property
    def log_gain(self) -> float:
        """log(before / after)."""
        return log(self.before.latency_us / self.after.latency_us)

    def log_error(self, up: bool) -> float:
        """How far the gain may be off to one side; the two times err independently."""
        if self.before is self.after:
            return 0.0
        slow, quick = (self.before, self.after) if up else (self.after, self.before)
        return hypot(log(slow.high_us / slow.latency_us), log(quick.latency_us / quick.low_us))


def weigh(settings: Sequence[Setting], changes: Sequence[Change], note: str) -> Advice | None:
    """What the changes come to; None where that is no gain."""
    weight = fsum(one.cell.weight for one in changes)

    def mean(of: Callable[[Change], float]) -> float:
        return exp(fsum(one.cell.weight * of(one) for one in changes) / weight)

    if not settings or not changes or (gain := mean(lambda one: one.log_gain)) <= 1 + MARGIN:
        return None
    low = gain / mean(lambda one: one.log_error(up=False))
    total = fsum(one.cell.weight * one.before.latency_us for one in changes) / fsum(
        one.cell.weight * one.after.latency_us for one in changes
    )
    slowest = min(changes, key=lambda one: one.log_gain)
    slower = slowest.log_gain < 0
    worst = exp(-slowest.log_gain) if slower else 1.0
    sure = low > 1 and total > 1 + MARGIN and worst <= _MOST_LOST
    return Advice(
        settings=tuple(settings),
        verdict=Verdict.WIN if sure else Verdict.UNSURE,
        gain=gain,
        low=low,
        high=gain * mean(lambda one: one.log_error(up=True)),
        total=total,
        batches=len(changes),
        changed=sum(one.before is not one.after for one in changes),
        worst=worst,
        worst_batch=str(slowest.cell.batch) if slower else "",
        lost=mean(lambda one: log(one.after.latency_us / one.cell.best)),
        lost_at_worst=max(one.after.latency_us / one.cell.best for one in changes),
        note=note,
    )
