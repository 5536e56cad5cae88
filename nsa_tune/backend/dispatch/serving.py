"""Serving: one table's answers, unchangeable. A dispatcher holds one, and swaps it on reload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cache
from math import exp, log
from typing import TYPE_CHECKING, Any

from nsa_tune._errors import UnknownName
from nsa_tune.backend.dispatch.decide import Choice, Verdict, decide, decide_for_all, pick
from nsa_tune.backend.dispatch.evidence import certified
from nsa_tune.backend.dispatch.explain import derived_reason, reason_of
from nsa_tune.backend.dispatch.plan import (
    DECIDED,
    DERIVED,
    TUNED,
    Origin,
    Plan,
    Reason,
    coupled,
    facts_of,
)
from nsa_tune.backend.dispatch.point_code import Asked, Kind, Question
from nsa_tune.backend.dispatch.straightline import choice_function, plan_function
from nsa_tune.backend.types.batch import MAX_TOKENS, Batch, Mode

if TYPE_CHECKING:
    from nsa_tune.backend.baselines import Rule
    from nsa_tune.backend.costmodel.policy import Policy
    from nsa_tune.backend.types.point import Answer, Setting
    from nsa_tune.backend.types.records import Key

__all__ = ["Match", "Serving"]

_MOST_STEPS = 64
"""Values of next_n that code is written for."""
_CONTEXTS = 17
"""Context lengths at which a captured size is weighed when nobody says which will come."""
_UNMEASURED = (1024, 131072)
"""Shortest and longest context where nothing was measured."""


class Match(StrEnum):
    """How well the table that answers fits what was asked for; the best first."""

    EXACT = "exact"
    """Measured on this GPU, with this driver and these libraries, as far as that can be seen."""
    STALE = "stale"
    """Measured on this GPU, with another driver or other library versions."""
    ARCHITECTURE = "architecture"
    """Measured on another GPU of the same architecture."""
    RULE = "rule"
    """Nothing was measured: the engine's own rule answers."""


class Serving:
    """Answers for one setting from one set of policies. Safe to share between threads."""

    def __init__(
        self,
        setting: Setting,
        policies: Iterable[Policy],
        *,
        source: str,
        match: Match,
        rule: Rule,
        key: Key | None = None,
        forced: Mapping[str, str] | None = None,
    ) -> None:
        """`forced` has for a point the arm that is taken where it is allowed."""
        self.setting = setting
        self.source = source
        self.match = match
        self.rule = rule
        self.key = key
        self.forced = dict(forced or {})
        self.policies = {policy.point.name: policy for policy in policies}
        asked = [
            Asked(
                policy,
                tuple(Question(answer, rule.chooser(answer)) for answer in policy.point.answers),
            )
            for policy in self.policies.values()
        ]
        self._by_mode = {
            mode: tuple(one for one in asked if mode in one.policy.point.modes) for mode in Mode
        }
        self._origin = _Because(self, None)
        self.extend: Callable[[Batch], Plan] = self._first_extend
        """The plan of an extend batch."""
        self.steps = {mode: _Steps(self, mode) for mode in Mode}
        """By mode and next_n: the plan of a batch that is not captured."""
        self._choosers: dict[tuple[str, Kind], Callable[[Batch], str | None]] = {}

    # --- plans

    def _first_extend(self, batch: Batch) -> Plan:
        # Written when first needed. Two threads may do so at once: either's is the same.
        self.extend = self.planner(Mode.EXTEND, 1)
        return self.extend(batch)

    def planner(self, mode: Mode, next_n: int) -> Callable[[Batch], Plan]:
        """The fastest function for batches of this kind, with lengths or without."""
        if self.forced:
            return self.slow_plan
        held, asked = _Held(self, mode), self._by_mode[mode]

        def written(has_lens: bool, other: Callable[[Batch], Plan]) -> Callable[[Batch], Plan]:
            kind = Kind(mode, next_n, has_lens)
            function = plan_function(asked, kind, held, self.slow_plan, other)
            return function or self.slow_plan

        @cache
        def with_lens() -> Callable[[Batch], Plan]:
            return written(True, self.slow_plan)

        return written(False, lambda batch: with_lens()(batch))

    def slow_plan(self, batch: Batch) -> Plan:
        """The plan of any batch as its own, captured or not, by asking everything."""
        chosen: dict[str, str | None] = {}
        for policy, questions in self._by_mode[batch.mode]:
            survey = policy.survey(batch)
            forced = self.forced.get(policy.point.name)
            for answer, default in questions:
                rule = default(batch, self.setting)
                chosen[answer.name] = pick(answer, survey, rule, forced)[0]
        return self._plan(batch, chosen, self._origin)

    def _plan(self, batch: Batch, chosen: Mapping[str, str | None], origin: Origin) -> Plan:
        facts = facts_of(batch, self.setting.profile.index_topk)
        decided = self.decisions(batch.mode, chosen, *facts)
        fields: dict[str, Any] = dict(zip(DECIDED, decided, strict=True))
        return Plan(batch=batch, _origin=origin, **fields)

    def decisions(
        self, mode: Mode, chosen: Mapping[str, str | None], has_prefix: bool, within_topk: bool
    ) -> tuple[str | bool | None, ...]:
        """The choices and what follows from them, as a plan holds them."""
        path, sparse = chosen.get("prefill_path"), chosen.get("sparse_prefill")
        derived = coupled(
            mode, self.setting.layout, path, sparse, has_prefix, within_topk, chosen.get("decode")
        )
        found = {**chosen, **derived._asdict()}
        return tuple(map(found.get, DECIDED))

    def chooser(
        self, name: str, mode: Mode, next_n: int, has_lens: bool
    ) -> Callable[[Batch], str | None]:
        """The fastest function for one field of the plans of this mode.

        Raises:
            UnknownName: when the mode has no such question.
        """
        kind = Kind(mode, next_n, has_lens)
        known = self._choosers.get((name, kind))
        if known is not None:
            return known
        policy, question = self._question(mode, name)

        def slow(batch: Batch) -> str | None:
            value: str | None = getattr(self.slow_plan(batch), name)
            return value

        written = None if self.forced else choice_function(policy, question, kind, slow)
        if len(self._choosers) < _MOST_STEPS:
            self._choosers[name, kind] = written or slow
        return written or slow

    # --- captured sizes

    def captured_plan(
        self, mode: Mode, batch_size: int, next_n: int, contexts: Mapping[int, float] | None
    ) -> Plan:
        """The one plan for every context, or for `contexts` (length to how often it comes)."""
        lengths = sorted(contexts or self._spaced(mode, batch_size, next_n))
        weights = [contexts[length] for length in lengths] if contexts else []
        batches = [
            Batch.from_totals(
                mode=mode,
                sequences=batch_size,
                q_tokens=batch_size * next_n,
                kv_tokens=batch_size * length,
                max_kv=length,
                next_n=next_n,
                captured=True,
            )
            for length in lengths
        ]
        choices: dict[str, Choice] = {}
        for policy, questions in self._by_mode[mode]:
            forced = self.forced.get(policy.point.name)
            for answer, default in questions:
                choices[answer.name] = decide_for_all(
                    answer, policy, batches, self.setting, default, weights=weights, forced=forced
                )
        chosen = {name: choice.choice for name, choice in choices.items()}
        because = _Because(self, choices)
        return self._plan(batches[-1], chosen, because)

    def replayed(self, plan: Plan, batch: Batch) -> Plan:
        """A captured size's `plan` for one replay, without what a limit forbids on `batch`."""
        forbidden = {}
        for policy, questions in self._by_mode[batch.mode]:
            survey = policy.survey(batch)
            for answer, _ in questions:
                choice = getattr(plan, answer.name)
                if choice in answer.choices and not any(
                    arm in survey.latencies for arm in answer.choices[choice]
                ):
                    why = {**survey.refused, **survey.failed}
                    found = [why[arm] for arm in answer.choices[choice] if arm in why]
                    if found:
                        forbidden[answer.name] = found[0]
        chosen = {name: getattr(plan, name) for name in TUNED if name not in forbidden}
        origin = plan._origin
        assert isinstance(origin, _Because)
        return self._plan(batch, chosen, origin.without(forbidden))

    def _spaced(self, mode: Mode, batch_size: int, next_n: int) -> set[int]:
        """Contexts spread evenly in octaves over the measured range."""
        extents = [
            one.policy.compiled.extent for one in self._by_mode[mode] if one.policy.compiled.extent
        ]
        # A big batch was never measured at the longest contexts: its keys fill no pool.
        most = max([extent.most_kv for extent in extents], default=MAX_TOKENS) // batch_size
        shortest = min([extent.shortest for extent in extents], default=_UNMEASURED[0])
        longest = max([extent.longest for extent in extents], default=_UNMEASURED[1])
        low, high = (max(min(length, most), next_n) for length in (shortest, longest))
        steps = [i / (_CONTEXTS - 1) for i in range(_CONTEXTS)]
        return {round(exp(log(low) + step * (log(high) - log(low)))) for step in steps}

    # --- reasons

    def questions(self, mode: Mode) -> tuple[str, ...]:
        """The tuned fields of a plan for `mode`."""
        return tuple(
            question.answer.name for asked in self._by_mode[mode] for question in asked.questions
        )

    def decide(self, batch: Batch, name: str) -> Choice:
        """The choice behind the tuned field `name` of a plan, with all that led to it.

        Raises:
            UnknownName: when the batch's mode has no such question.
        """
        policy, (answer, default) = self._question(batch.mode, name)
        rule, forced = default(batch, self.setting), self.forced.get(policy.point.name)
        return decide(answer, policy, batch, self.setting, rule, forced)

    def policy_of(self, mode: Mode, name: str) -> Policy:
        """The policy that answers the question called `name`.

        Raises:
            UnknownName: when the mode has no such question.
        """
        return self._question(mode, name)[0]

    def answer_of(self, mode: Mode, name: str) -> Answer:
        """The question called `name`, with its choices and their arms.

        Raises:
            UnknownName: when the mode has no such question.
        """
        return self._question(mode, name)[1].answer

    def _question(self, mode: Mode, name: str) -> tuple[Policy, Question]:
        for policy, questions in self._by_mode[mode]:
            for question in questions:
                if question.answer.name == name:
                    return policy, question
        raise UnknownName.of(f"question in {mode}", name, list(self.questions(mode)))


class _Steps(dict[int, Callable[[Batch], Plan]]):
    """The planners of one mode by next_n, each written when first asked for."""

    def __init__(self, serving: Serving, mode: Mode) -> None:
        super().__init__()
        self._serving = serving
        self._mode = mode

    def __missing__(self, next_n: int) -> Callable[[Batch], Plan]:
        if len(self) >= _MOST_STEPS:
            return self._serving.slow_plan
        planner = self[next_n] = self._serving.planner(self._mode, next_n)
        return planner


class _Held(dict[tuple[object, ...], tuple[object, ...]]):
    """What plans of one mode hold besides their batch: for each set of choices made once."""

    def __init__(self, serving: Serving, mode: Mode) -> None:
        super().__init__()
        self._serving = serving
        self._mode = mode

    def __missing__(self, key: tuple[object, ...]) -> tuple[object, ...]:
        by = self._serving
        names = by.questions(self._mode)
        chosen: dict[str, Any] = dict(zip(names, key, strict=False))
        facts = [bool(fact) for fact in key[len(names) :]] or [False, False]
        held = self[key] = (*by.decisions(self._mode, chosen, *facts), by._origin)
        return held


class _Because:
    """Says why a plan's fields have their values: by deciding again, or from `choices`."""

    def __init__(
        self,
        serving: Serving,
        choices: Mapping[str, Choice] | None,
        forbidden: Mapping[str, str] | None = None,
    ) -> None:
        self._serving = serving
        self._choices = choices
        self._forbidden = forbidden or {}

    def without(self, forbidden: Mapping[str, str]) -> _Because:
        """The same for a replay on which a limit speaks against these choices."""
        return _Because(self._serving, self._choices, forbidden)

    def names(self, plan: Plan) -> tuple[str, ...]:
        """The fields of `plan` that have a reason."""
        extend = plan.batch.mode is Mode.EXTEND
        tuned = self._serving.questions(plan.batch.mode)
        if self._serving.setting.profile.family == "v4":
            return tuned
        return (*tuned, *(name for name in DERIVED if extend or name != "dequantize_prefix"))

    def reason(self, plan: Plan, name: str) -> Reason:
        """Why the field `name` of `plan` has its value."""
        by = self._serving
        if name in DERIVED:
            return derived_reason(plan, name, by.rule)
        if name in self._forbidden:
            why = self._forbidden[name]
            text = f"what the graph holds must not run on this batch: {why}"
            assert self._choices is not None
            held = str(self._choices[name].choice)
            return Reason(Verdict.NONE, "hard limits", {}, {}, {held: why}, text)
        choice = by.decide(plan.batch, name) if self._choices is None else self._choices[name]
        return certified(reason_of(choice, by.rule, by.source), choice, by, plan.batch)
