"""A policy that caches by batch: a report asks about the same batch once for each question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from nsa_tune.backend.baselines import Baseline
from nsa_tune.backend.costmodel.policy import Policy, Survey
from nsa_tune.backend.costmodel.surface import Estimate, SharedPlaces
from nsa_tune.backend.dispatch.decide import Choice, decide
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Question, Setting
from nsa_tune.backend.types.records import Measurement


class CachedPolicy(Policy):
    """The policy of one point in one table, with its baseline."""

    baseline: Baseline

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._surveyed: dict[Batch, Survey] = {}
        self._estimated: dict[Batch, dict[str, Estimate]] = {}
        self._arms = tuple(self.point.candidates(self.setting))
        self._decided: dict[tuple[str, Batch], Choice] = {}

    @classmethod
    def of(
        cls, point: Point, setting: Setting, rows: Sequence[Measurement], baseline: Baseline,
        places: SharedPlaces,
    ) -> Self:  # fmt: skip
        """The policy of `point`, fitted to `rows`.

        `places` is shared by all tables of a report, which hold much the same batches.
        """
        policy = cls.fit(point, setting, rows)
        policy.baseline, policy.places = baseline, places
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
        """The arms that a guard forbids. Cheaper than `survey`, which also estimates times."""
        return frozenset(
            arm.name for arm in self._arms if arm.allowed(batch, self.setting) is not None
        )

    def decide(self, question: Question, batch: Batch) -> Choice:
        """The decision on `question` for `batch`, with the engine's baseline as the default."""
        place = (question.name, batch)
        if place not in self._decided:
            default = self.baseline.choose(question, batch, self.setting)
            self._decided[place] = decide(question, self, batch, default)
        return self._decided[place]
