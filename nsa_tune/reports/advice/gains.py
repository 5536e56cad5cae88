"""Gains: what new values of engine options gain over all batches, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, fsum, hypot, log
from typing import NamedTuple

from nsa_tune.backend.costmodel.regret import MARGIN
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.types.batch import Batch
from nsa_tune.reports.advice.advice import Advice, EngineOption

_MOST_LOST = 1.25
"""Options that make any batch slower than this factor are never a sure gain."""


class PrefillSettings(NamedTuple):
    """The engine options that decide which path and kernel a prefill takes."""

    impl: str
    """Kernel of MLA."""
    threshold: int
    """Largest max_kv with MHA."""
    capacity: int
    """Largest kv_tokens with MHA."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """One batch, with the estimated times of what may run on it."""

    batch: Batch
    weight: float
    mha: Estimate | None
    mla: dict[str, Estimate]

    def dense(self, settings: PrefillSettings) -> bool:
        """Whether the engine takes MHA with `settings`."""
        fits = self.batch.max_kv <= settings.threshold
        return self.mha is not None and fits and self.batch.kv_tokens <= settings.capacity

    def time(self, settings: PrefillSettings) -> Estimate | None:
        """The batch's time with `settings`; None where it has no estimate."""
        return self.mha if self.dense(settings) else self.mla.get(settings.impl)

    @property
    def best(self) -> float:
        """The shortest time, in microseconds."""
        every = [*self.mla.values(), *([self.mha] if self.mha else [])]
        return min(one.latency_us for one in every)


class Change(NamedTuple):
    """The time of one batch before and after options change."""

    times: BatchTimes
    before: Estimate
    after: Estimate

    @property
    def log_gain(self) -> float:
        """log(before / after)."""
        return log(self.before.latency_us / self.after.latency_us)

    def log_error(self, up: bool) -> float:
        """How far the gain may be off upwards or downwards, if both times err independently."""
        if self.before is self.after:
            return 0.0
        slow, quick = (self.before, self.after) if up else (self.after, self.before)
        return hypot(log(slow.high_us / slow.latency_us), log(quick.latency_us / quick.low_us))


def advice_on(
    settings: Sequence[EngineOption], changes: Sequence[Change], note: str
) -> Advice | None:
    """The advice to set `settings`, which leads to `changes`; None without a gain."""
    weight = fsum(one.times.weight for one in changes)

    def mean(of: Callable[[Change], float]) -> float:
        return exp(fsum(one.times.weight * of(one) for one in changes) / weight)

    if not settings or not changes or (gain := mean(lambda one: one.log_gain)) <= 1 + MARGIN:
        return None
    low = gain / mean(lambda one: one.log_error(up=False))
    total = fsum(one.times.weight * one.before.latency_us for one in changes) / fsum(
        one.times.weight * one.after.latency_us for one in changes
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
        worst_batch=str(slowest.times.batch) if slower else "",
        lost=mean(lambda one: log(one.after.latency_us / one.times.best)),
        lost_at_worst=max(one.after.latency_us / one.times.best for one in changes),
        note=note,
    )
