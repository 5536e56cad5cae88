"""Prices: how long the attention of one pass takes, step by step, under each way to choose.

Every time is an estimate of the table's surfaces, for all layers of a pass. A step is a decision
point. What a point has no time for, neither for the engine's choice nor for any other, has no price
and is left out under every way alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from math import inf
from typing import NamedTuple

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.dispatch.plan import Plan
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.point import Point
from nsa_tune.backend.types.records import Table
from nsa_tune.engines.sglang.costs.around_mha import around_mha_us
from nsa_tune.engines.sglang.costs.own_copies import longer_us
from nsa_tune.engines.sglang.releases import Release
from nsa_tune.reports.replay.flags import FLAGGED, Flags, flags_for

LENT = ("indexer_prefill", "indexer_layout", "indexer_metadata")
"""Points whose work is the same for any number of local heads and any KV format: the indexer has
heads and a cache of its own. Their times may come from another table of the same GPU. That of
`indexer_topk` is the same too, but its prices were not yet compared with an engine's passes."""
_ONCE_A_PASS = ("indexer_metadata",)
"""Points whose work is done once a pass, and not in every layer."""
_COPIED = "mla/flashmla_sparse"
_PAIR = 2
"""Draft tokens a sequence for which the plug-in changes the indexer's layout on Hopper."""


class Way(StrEnum):
    """Who chooses."""

    ENGINE = "engine"
    """The engine by itself, with its default flags."""
    PLUGIN = "plug-in"
    """The engine with nsa-tune's plug-in, which follows the table where it can steer."""
    TABLE = "table"
    """The dispatcher's plan in full, as if the engine could run every arm."""
    BEST = "best arm"
    """The fastest allowed arm of each step by its estimate."""


class StepPrice(NamedTuple):
    """One step of one pass."""

    point: str
    times: tuple[Estimate, ...]
    """By `Way`, in its order: all layers of a pass."""
    arms: tuple[str, ...]
    """The arm behind each."""
    gains_us: Mapping[str, float]
    """By question: what the engine would save if only this answer were the table's."""


class Price(NamedTuple):
    """One pass."""

    steps: tuple[StepPrice, ...]
    unpriced: tuple[str, ...]
    """Steps that the pass has and that have no price."""
    static: tuple[float, ...]
    """For each of the pricer's `flags` of this kind of pass, the microseconds of its attention;
    infinite where they name a kernel that cannot run."""

    def total_us(self, way: Way) -> float:
        """Attention in the pass."""
        number = _NUMBERS[way]
        return sum(step.times[number].latency_us for step in self.steps)


_NUMBERS = {way: number for number, way in enumerate(Way)}
_Chosen = Mapping[str, str | None]
"""Question to choice."""


class Pricer:
    """Prices passes by one dispatcher's table."""

    def __init__(
        self, dispatcher: Dispatcher, release: Release, lent: Mapping[str, Policy] | None = None
    ) -> None:
        """`lent` has policies for points that the dispatcher's table has nothing of."""
        self.dispatcher = dispatcher
        self.setting = dispatcher.setting
        self.lent = dict(lent or {})
        self._impls = release.prefill_impls.get(self.setting.layout, frozenset())
        policies = {**dispatcher.policies, **self.lent}
        self._by_kind = {
            kind: [one for one in policies.values() if mode in one.point.modes]
            for kind, mode in ((True, Mode.EXTEND), (False, Mode.DECODE))
        }
        self.flags: dict[bool, tuple[Flags, ...]] = {
            extend: flags_for(policies, extend=extend) for extend in (True, False)
        }
        """What flags may say, for extends (True) and for decode passes; the default comes first."""
        hooked = any(one.name == "read_back" for one in release.symbols)
        self._copies = hooked and self.setting.device.arch == "sm90"
        """Whether the plug-in copies around `flashmla_sparse`, in less time than SGLang."""
        self._leaves_copies = not hooked and self.setting.device.arch == "sm90"
        """Whether SGLang makes these copies with the plug-in too."""
        self._remaining: dict[tuple[str | None, ...], frozenset[str]] = {}
        """By point and answers: the arms that remain."""

    def price(self, batch: Batch, *, graph: bool) -> Price:
        """The price of `batch`; with `graph` the pass runs as a CUDA graph.

        An engine runs the indexer and attention of a prefill eagerly between the parts of its
        graph, so that all that a graph forbids there is MHA. Decode is captured as a whole.
        """
        extend = batch.mode is Mode.EXTEND
        captured = replace(batch, captured=True) if graph else batch
        plan = self.dispatcher.plan(captured)
        steps: list[StepPrice] = []
        unpriced: list[str] = []
        static = [0.0] * len(self.flags[extend])
        for policy in self._by_kind[extend]:
            name = policy.point.name
            own = captured if name == "prefill" or not extend else batch
            if not _has(name, own, plan):
                continue
            step, times = self._step(policy, own, plan)
            if step is not None:
                steps.append(step)
                static = [one + more for one, more in zip(static, times, strict=True)]
            elif times:
                unpriced.append(name)
        return Price(tuple(steps), tuple(unpriced), tuple(static))

    def of_choices(
        self, batch: Batch, answers: Mapping[str, str], *, graph: bool, alone: bool = False
    ) -> tuple[dict[str, Estimate], tuple[str, ...]]:
        """What each step of `batch` takes, as a pass that really ran answered the questions
        `answers`; the engine's own answers count for the others. Then the steps without a price.

        `alone` says that the plug-in did not copy for SGLang in that pass.
        """
        extend = batch.mode is Mode.EXTEND
        captured = replace(batch, captured=True) if graph else batch
        found: dict[str, Estimate] = {}
        unpriced: list[str] = []
        for policy in self._by_kind[extend]:
            name = policy.point.name
            own = captured if name == "prefill" or not extend else batch
            if extend and name == "indexer_metadata":
                continue  # engines score a prefill's keys in one piece
            timed = self._timed(policy, own)
            if timed is None:
                continue
            times = self._alone(timed, own) if alone else timed
            chosen = self._engine(policy.point, own)
            chosen |= {key: value for key, value in answers.items() if key in chosen}
            arm = self._fastest(policy.point, chosen, times)
            if arm is None:
                unpriced.append(name)
            else:
                found[name] = times[arm]
        return found, tuple(unpriced)

    def _timed(self, policy: Policy, batch: Batch) -> Mapping[str, Estimate] | None:
        """What each allowed arm takes in all layers of a pass; None where the pass does not have
        the step, as the indexer's while every key is selected anyway."""
        allowed, every = policy.survey(batch).latencies, policy.estimates(batch)
        layers = 1 if policy.point.name in _ONCE_A_PASS else self.setting.sharing
        if not allowed:
            return None
        return {
            arm: _times(every[arm].plus(self._around_us(arm, batch)), layers)
            for arm in allowed
            if arm in every
        }

    def _around_us(self, arm: str, batch: Batch) -> float:
        """What the engine runs around an arm in each layer, with the plug-in or without."""
        if arm == _COPIED and self._leaves_copies:
            return self._longer_us(batch)
        return around_mha_us(batch, self.setting.layout) if arm.startswith("mha/") else 0.0

    def _longer_us(self, batch: Batch) -> float:
        """How much longer SGLang's own copies take than nsa-tune's, in each layer."""
        return longer_us(batch, self.setting.layout, self.setting.heads)

    def _engine(self, point: Point, batch: Batch) -> dict[str, str | None]:
        """What the engine answers by itself."""
        baseline = self.dispatcher.baseline
        found: dict[str, str | None] = {
            one.name: baseline.choose(one, batch, self.setting) for one in point.questions
        }
        if batch.next_n == 1 and found.get("indexer_layout") == "flatten":
            found["indexer_layout"] = "native"  # one and the same there
        return found

    def _step(
        self, policy: Policy, batch: Batch, plan: Plan
    ) -> tuple[StepPrice | None, list[float]]:
        """The price of one step, and its time under each of the flags; None without a price, and no
        times where the pass does not have the step."""
        point, timed = policy.point, self._timed(policy, batch)
        if timed is None:
            return None, []
        engine = self._engine(point, batch)
        table = engine if point.name in self.lent else _answers(point, plan, engine)
        alone = self._alone(timed, batch)
        usual = self._fastest(point, engine, alone)
        if usual is None:
            return None, [0.0] * len(self.flags[batch.mode is Mode.EXTEND])
        arms = (
            usual,
            self._fastest(point, self._steered(engine, table, batch), timed) or usual,
            self._fastest(point, table, timed) or usual,
            min(timed, key=lambda arm: timed[arm].latency_us),
        )
        step = StepPrice(
            point.name,
            (alone[usual], *(timed[arm] for arm in arms[1:])),
            arms,
            dict(self._gains(point, engine, table, timed, usual, alone[usual])),
        )
        return step, self._static(point, engine, batch, alone)

    def _alone(self, timed: Mapping[str, Estimate], batch: Batch) -> Mapping[str, Estimate]:
        """`timed` where the plug-in does not copy for SGLang."""
        if not self._copies or _COPIED not in timed:
            return timed
        more_us = self._longer_us(batch) * self.setting.sharing
        return {**timed, _COPIED: timed[_COPIED].plus(more_us)}

    def _static(
        self, point: Point, engine: _Chosen, batch: Batch, times: Mapping[str, Estimate]
    ) -> list[float]:
        """The step's time under each of the flags. Many of them come to the same choices."""
        flags = self.flags[batch.mode is Mode.EXTEND]
        if FLAGGED.isdisjoint(engine):
            arm = self._fastest(point, engine, times)
            return [inf if arm is None else times[arm].latency_us] * len(flags)
        found: dict[tuple[str | None, bool], float] = {}
        static = []
        for one in flags:
            key = one.kernel, one.forbids_mha(batch)
            if key not in found:
                chosen = one.applied(engine, batch)
                arm = self._fastest(point, chosen, times)
                found[key] = inf if arm is None else times[arm].latency_us
            static.append(found[key])
        return static

    def _fastest(self, point: Point, chosen: _Chosen, timed: Mapping[str, Estimate]) -> str | None:
        """The fastest of the arms that remain when every question is answered so."""
        key = point.name, *[chosen[question.name] for question in point.questions]
        remaining = self._remaining.get(key)
        if remaining is None:
            arms = (arm.name for arm in point.arms)
            remaining = frozenset(arm for arm in arms if _remains(point, chosen, arm))
            self._remaining[key] = remaining
        best, best_us = None, inf
        for arm, one in timed.items():
            if one.latency_us < best_us and arm in remaining:
                best, best_us = arm, one.latency_us
        return best

    def _gains(
        self, point: Point, engine: _Chosen, table: _Chosen, times: Mapping[str, Estimate],
        usual: str, alone: Estimate,
    ) -> Iterable[tuple[str, float]]:  # fmt: skip
        """`alone` is what the engine's own arm `usual` takes without the plug-in."""
        for question in point.questions:
            name = question.name
            if table[name] != engine[name]:
                arm = self._fastest(point, {**engine, name: table[name]}, times)
                if arm is not None and arm != usual:
                    yield name, alone.latency_us - times[arm].latency_us

    def _steered(self, engine: _Chosen, table: _Chosen, batch: Batch) -> _Chosen:
        """What the plug-in makes of the engine's choices."""
        found = dict(engine)
        if engine.get("prefill_path") == "mha" and table.get("prefill_path") == "mla":
            found["prefill_path"] = "mla"
        if table.get("sparse_prefill") in self._impls:
            found["sparse_prefill"] = table["sparse_prefill"]
        pairs = table.get("indexer_layout") in ("native", "pairs")
        if batch.mode is Mode.TARGET_VERIFY and batch.next_n == _PAIR and pairs:
            found["indexer_layout"] = table["indexer_layout"]
        return {
            name: table[name] if name.startswith("v4_prefill") else choice
            for name, choice in found.items()
        }


def _has(point: str, batch: Batch, plan: Plan) -> bool:
    """Whether a pass has the step: only paged logits need a schedule."""
    paged = batch.mode is not Mode.EXTEND or plan.indexer_prefill == "paged"
    return point != "indexer_metadata" or paged


def _answers(point: Point, plan: Plan, engine: _Chosen) -> _Chosen:
    """The plan's answers, the engine's where it has none."""
    found = {one.name: getattr(plan, one.name) for one in point.questions}
    return {name: engine[name] if value is None else value for name, value in found.items()}


def _remains(point: Point, chosen: _Chosen, arm: str) -> bool:
    """Whether no question that the arm is an answer to is answered otherwise."""
    return all(
        arm in question.choices.get(chosen[question.name] or "", ())
        or not any(arm in arms for arms in question.choices.values())
        for question in point.questions
    )


def _times(one: Estimate, layers: int) -> Estimate:
    return Estimate(
        one.latency_us * layers, one.low_us * layers, one.high_us * layers, one.extrapolated
    )


def borrowed(dispatcher: Dispatcher, tables: Iterable[Table]) -> dict[str, tuple[Policy, Table]]:
    """For points of the indexer that the dispatcher's table has nothing of: policies fitted to
    another table of the same GPU and model. That with most measurements lends; of several the one
    with most heads."""
    policies = dispatcher.policies
    lacking = [name for name in LENT if name in policies and not policies[name].measured]
    found: dict[str, tuple[Policy, Table]] = {}
    most: dict[str, tuple[int, int]] = {}
    for table in tables:
        for name in lacking:
            rows = [row for row in table.measurements if row.point == name]
            rank = len(rows), table.key.heads
            if rows and rank > most.get(name, (0, 0)):
                policy = Policy.fit(policies[name].point, dispatcher.setting, rows)
                found[name], most[name] = (policy, table), rank
    return found
