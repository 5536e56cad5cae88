"""A policy that keeps what it worked out: a report asks about one batch for every question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nsa_tune.backend.costmodel.policy import Policy, Survey
from nsa_tune.backend.dispatch.decide import Choice, decide

if TYPE_CHECKING:
    from nsa_tune.backend.baselines import Rule
    from nsa_tune.backend.costmodel.surface import Estimate, SharedPlaces
    from nsa_tune.backend.types.batch import Batch
    from nsa_tune.backend.types.point import Answer, Point, Setting
    from nsa_tune.backend.types.records import Measurement

__all__ = ["Remembering"]


class Remembering(Policy):
    """A policy of one table in a report."""

    rule: Rule
    measurements: tuple[Measurement, ...]
    """Everything measured of the point."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._surveyed: dict[Batch, Survey] = {}
        self._estimated: dict[Batch, dict[str, Estimate]] = {}
        self._decided: dict[tuple[str, Batch], Choice] = {}
        self._arms = tuple(self.point.candidates(self.setting))

    @classmethod
    def of(
        cls, point: Point, setting: Setting, rows: Sequence[Measurement], rule: Rule,
        places: SharedPlaces,
    ) -> Remembering:  # fmt: skip
        """The policy of `point` from `rows`; `rule` is the engine's, and `places` the report's:
        its tables are of much the same batches."""
        remembered = replace(
            point, locate=_remembered(point.locate), cost_terms=_remembered(point.cost_terms)
        )
        policy = cls.compile(remembered, setting, rows)
        assert isinstance(policy, cls)
        policy.rule, policy.measurements, policy.places = rule, tuple(rows), places
        return policy

    def survey(self, batch: Batch) -> Survey:
        if batch not in self._surveyed:
            self._surveyed[batch] = super().survey(batch)
        return self._surveyed[batch]

    def estimates(self, batch: Batch) -> dict[str, Estimate]:
        if batch not in self._estimated:
            self._estimated[batch] = super().estimates(batch)
        return self._estimated[batch]

    def refused(self, batch: Batch) -> frozenset[str]:
        """The arms that a guard forbids, without asking how long the others take."""
        return frozenset(
            arm.name for arm in self._arms if arm.allowed(batch, self.setting) is not None
        )

    def decide(self, answer: Answer, batch: Batch) -> Choice:
        """The choice for `batch`, where the engine's rule is the default."""
        place = (answer.name, batch)
        if place not in self._decided:
            default = self.rule.choose(answer, batch, self.setting)
            self._decided[place] = decide(answer, self, batch, self.setting, default)
        return self._decided[place]


def _remembered(
    work_out: Callable[[Batch, Setting], tuple[float, ...]],
) -> Callable[[Batch, Setting], tuple[float, ...]]:
    """`work_out` for one setting, once a batch: every arm asks for the same."""
    known: dict[Batch, tuple[float, ...]] = {}

    def once(batch: Batch, setting: Setting) -> tuple[float, ...]:
        found = known.get(batch)
        if found is None:
            found = known[batch] = work_out(batch, setting)
        return found

    return once
