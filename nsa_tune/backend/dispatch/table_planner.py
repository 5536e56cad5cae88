"""TablePlanner: the plans of one table. A dispatcher holds one, and swaps it on reload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from math import exp, log
from typing import TYPE_CHECKING, Any, TypeAlias

from nsa_tune._errors import UnknownName
from nsa_tune.backend.dispatch.compiled import Decisions, PointCode
from nsa_tune.backend.dispatch.compiled import Key as DecisionKey
from nsa_tune.backend.dispatch.decide import Choice, Verdict, decide, decide_for_all, pick
from nsa_tune.backend.dispatch.evidence import certified
from nsa_tune.backend.dispatch.explain import derived_reason, reason_of
from nsa_tune.backend.dispatch.plan import (
    DECIDED,
    DERIVED,
    TUNED,
    Origin,
    Plan,
    PlanDraft,
    Reason,
    coupled,
    facts_of,
)
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.lengths import MAX_TOKENS

if TYPE_CHECKING:
    from nsa_tune.backend.baselines import Baseline
    from nsa_tune.backend.costmodel.policy import Policy
    from nsa_tune.backend.types.point import Question, Setting
    from nsa_tune.backend.types.records import Key

_Planner: TypeAlias = Callable[[Batch], Plan]
_Chosen: TypeAlias = Callable[[str], str | None]
"""What is chosen for a question, by its name."""

_CONTEXTS = 17
"""Context lengths at which a captured size is weighed when nobody says which will come."""
_GOLDEN = (5**0.5 - 1) / 2
"""Fractions of its multiples are spread evenly, however many are taken."""
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
    BASELINE = "baseline"
    """Nothing was measured: the engine's own baseline answers."""


class TablePlanner:
    """Answers for one setting from one set of policies. Safe to share between threads."""

    def __init__(
        self,
        setting: Setting,
        policies: Iterable[Policy],
        *,
        source: str,
        match: Match,
        baseline: Baseline,
        key: Key | None = None,
        forced: Mapping[str, str] | None = None,
    ) -> None:
        """`forced` has for a point the arm that is taken where it is allowed."""
        self.setting = setting
        self.source = source
        self.match = match
        self.baseline = baseline
        self.key = key
        self.forced = dict(forced or {})
        self.policies = {policy.point.name: policy for policy in policies}
        self._by_mode = {
            mode: tuple(one for one in self.policies.values() if mode in one.point.modes)
            for mode in Mode
        }
        self._origin = _Because(self, None)
        self._choosers: dict[tuple[str | tuple[str, ...], Mode], Callable[[Batch], Any]] = {}
        # Attributes, as a call of a method takes longer.
        self.extend: _Planner = self._unprepared
        """The plan of an extend batch."""
        self.step: _Planner = self._unprepared
        """The plan of a batch of any other mode that is not captured."""

    # --- plans

    def prepare(self) -> None:
        """Write the functions now, so that no request waits for them."""
        if self.forced:
            self.extend = self.step = self.slow_plan
            return
        codes = {name: PointCode(one, self.baseline) for name, one in self.policies.items()}
        # Modes that ask the same have one function.
        made: dict[tuple[str, ...], _Planner] = {}
        planners: dict[Mode, _Planner] = {}
        for mode, policies in self._by_mode.items():
            names = [one.point.name for one in policies]
            kind = (str(mode is Mode.EXTEND), *names)
            if kind not in made:
                made[kind] = self._planner(mode, [codes[name] for name in names])
            planners[mode] = made[kind]
        self.extend = planners.pop(Mode.EXTEND)
        steps = {*planners.values()}
        self.step = steps.pop() if len(steps) == 1 else lambda batch: planners[batch.mode](batch)

    def _unprepared(self, batch: Batch) -> Plan:
        self.prepare()
        return (self.extend if batch.mode is Mode.EXTEND else self.step)(batch)

    def _planner(self, mode: Mode, codes: Sequence[PointCode]) -> _Planner:
        decisions = Decisions(codes)
        facts: tuple[str, ...] = ()
        if mode is Mode.EXTEND:
            # What the derived fields depend on besides the choices, as `facts_of`.
            facts = ("kv_tokens > q_tokens", f"max_kv <= {self.setting.profile.index_topk}")
        fields = ", ".join(f"plan.{name}" for name in (*DECIDED, "_origin"))
        tail = [
            "plan = Draft()",
            "plan.batch = batch",
            f"{fields} = found",
            "plan.__class__ = Plan",
            "return plan",
        ]

        def made(key: DecisionKey) -> tuple[object, ...]:
            has_prefix, within_topk = key[-2:] if facts else (False, False)
            chosen = decisions.choices(key)
            return (*self.decisions(mode, chosen, has_prefix, within_topk), self._origin)

        names = {"Draft": PlanDraft, "Plan": Plan, "slow": self.slow_plan}
        known = {"is_extend": str(mode is Mode.EXTEND)}
        attributes = (*DECIDED, "_origin", "batch")
        return decisions.function((), facts, made, tail, names, known, attributes)

    def slow_plan(self, batch: Batch) -> Plan:
        """The plan of any batch as its own, captured or not, by asking everything."""
        chosen: dict[str, str | None] = {}
        for policy in self._by_mode[batch.mode]:
            survey = policy.survey(batch)
            forced = self.forced.get(policy.point.name)
            for question in policy.point.questions:
                default = self.baseline.choose(question, batch, self.setting)
                chosen[question.name] = pick(question, survey, default, forced)[0]
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

    def chooser(self, name: str, mode: Mode) -> Callable[[Batch], str | None]:
        """The function for one field of the plans of this mode; batches of another take longer.

        Raises:
            UnknownName: when the mode has no such question.
        """
        found: Callable[[Batch], str | None] = self._chooser(name, mode)
        return found

    def choosers(
        self, names: tuple[str, ...], mode: Mode
    ) -> Callable[[Batch], tuple[str | None, ...]]:
        """The same for several fields at once.

        Raises:
            UnknownName: when the mode has no such question.
        """
        found: Callable[[Batch], tuple[str | None, ...]] = self._chooser(names, mode)
        return found

    def _chooser(self, asked: str | tuple[str, ...], mode: Mode) -> Callable[[Batch], Any]:
        if (asked, mode) not in self._choosers:
            self._choosers[asked, mode] = self._written(asked, mode)
        return self._choosers[asked, mode]

    def _written(self, asked: str | tuple[str, ...], mode: Mode) -> Callable[[Batch], Any]:
        names = (asked,) if isinstance(asked, str) else asked
        questions: dict[str, list[Question]] = {}
        for name in names:
            policy, question = self.question(mode, name)
            questions.setdefault(policy.point.name, []).append(question)

        def picked(chosen: _Chosen) -> Any:
            return chosen(asked) if isinstance(asked, str) else tuple(map(chosen, asked))

        def slow(batch: Batch) -> Any:
            return picked(partial(getattr, self.slow_plan(batch)))

        if self.forced:
            return slow
        of_points = questions.items()
        codes = [PointCode(self.policies[one], self.baseline, some) for one, some in of_points]
        decisions = Decisions(codes)
        other = "batch.mode is not mode" + (" or batch.captured" * (mode is not Mode.EXTEND))
        head = [f"if {other}:", "    return slow(batch)"]
        known = {"is_extend": str(mode is Mode.EXTEND)}

        def made(key: DecisionKey) -> Any:
            return picked(decisions.choices(key).__getitem__)

        values = {"mode": mode, "slow": slow}
        return decisions.function(head, (), made, ["return found"], values, known)

    # --- captured sizes

    def captured_plan(
        self, mode: Mode, batch_size: int, next_n: int, contexts: Mapping[int, float] | None
    ) -> Plan:
        """The one plan for every context, or for `contexts` (length to how often it comes)."""
        lengths = sorted(contexts or self._spaced(mode, batch_size, next_n))
        weights = [contexts[length] for length in lengths] if contexts else []
        equal = [
            Batch.from_totals(
                mode=mode,
                batch_size=batch_size,
                q_tokens=batch_size * next_n,
                kv_tokens=batch_size * length,
                max_kv=length,
                next_n=next_n,
                captured=True,
            )
            for length in lengths
        ]
        batches = equal if contexts else [_unequal(batch) for batch in equal]
        choices: dict[str, Choice] = {}
        for policy in self._by_mode[mode]:
            forced = self.forced.get(policy.point.name)
            for question in policy.point.questions:
                choices[question.name] = decide_for_all(
                    question, policy, batches, self.baseline, weights=weights, forced=forced
                )
        chosen = {name: choice.choice for name, choice in choices.items()}
        because = _Because(self, choices)
        return self._plan(equal[-1], chosen, because)

    def replayed(self, plan: Plan, batch: Batch) -> Plan:
        """A captured size's `plan` for one replay, without what a limit forbids on `batch`."""
        forbidden = {}
        for policy in self._by_mode[batch.mode]:
            survey = policy.survey(batch)
            why = {**survey.refused, **survey.failed}
            for question in policy.point.questions:
                arms = question.choices.get(getattr(plan, question.name), ())
                found = [why[arm] for arm in arms if arm in why]
                if found and survey.latencies.keys().isdisjoint(arms):
                    forbidden[question.name] = found[0]
        chosen = {name: getattr(plan, name) for name in TUNED if name not in forbidden}
        origin = plan._origin
        assert isinstance(origin, _Because)
        return self._plan(batch, chosen, origin.without(forbidden))

    def _spaced(self, mode: Mode, batch_size: int, next_n: int) -> set[int]:
        """Contexts spread evenly in octaves over the measured range."""
        extents = [one.fitted.extent for one in self._by_mode[mode] if one.fitted.extent]
        # A big batch was never measured at the longest contexts: its keys fill no pool.
        most = max([extent.most_kv for extent in extents], default=MAX_TOKENS) // batch_size
        shortest = min([extent.shortest for extent in extents], default=_UNMEASURED[0])
        longest = max([extent.longest for extent in extents], default=_UNMEASURED[1])
        low, high = (max(min(length, most), next_n) for length in (shortest, longest))
        steps = [i / (_CONTEXTS - 1) for i in range(_CONTEXTS)]
        return {round(exp(log(low) + step * (log(high) - log(low)))) for step in steps}

    # --- reasons

    @property
    def unmeasured(self) -> Mapping[str, tuple[str, ...]]:
        """By point, the arms that could run here and that the table knows too little of."""
        found = {name: policy.unmeasured for name, policy in self.policies.items()}
        return {name: arms for name, arms in found.items() if arms}

    def questions(self, mode: Mode) -> tuple[str, ...]:
        """The tuned fields of a plan for `mode`."""
        policies = self._by_mode[mode]
        return tuple(question.name for one in policies for question in one.point.questions)

    def decide(self, batch: Batch, name: str) -> Choice:
        """The choice behind the tuned field `name` of a plan, with all that led to it.

        Raises:
            UnknownName: when the batch's mode has no such question.
        """
        policy, question = self.question(batch.mode, name)
        default = self.baseline.choose(question, batch, self.setting)
        return decide(question, policy, batch, default, self.forced.get(policy.point.name))

    def question(self, mode: Mode, name: str) -> tuple[Policy, Question]:
        """The question called `name`, and the policy that answers it.

        Raises:
            UnknownName: when the mode has no such question.
        """
        for policy in self._by_mode[mode]:
            for question in policy.point.questions:
                if question.name == name:
                    return policy, question
        raise UnknownName.of(f"question in {mode}", name, list(self.questions(mode)))


def _unequal(batch: Batch) -> Batch:
    """`batch` with unequal sequences, as engines run them: from a quarter of its context to all of
    it, spread evenly and in no order."""
    contexts = [
        max(round(batch.max_kv * (1.0 - 0.75 * (i * _GOLDEN % 1.0))), batch.next_n)
        for i in range(batch.batch_size)
    ]
    if batch.mode is Mode.TARGET_VERIFY:
        return Batch.verify(contexts, batch.next_n, captured=True)
    if batch.mode is Mode.DRAFT_EXTEND:
        return Batch.draft_extend(contexts, batch.next_n, captured=True)
    # `Batch.decode` has one token a sequence: a decode of more stays as it is.
    return Batch.decode(contexts, captured=True) if batch.next_n == 1 else batch


class _Because:
    """Says why a plan's fields have their values: by deciding again, or from `choices`."""

    def __init__(
        self,
        planner: TablePlanner,
        choices: Mapping[str, Choice] | None,
        forbidden: Mapping[str, str] | None = None,
    ) -> None:
        self._planner = planner
        self._choices = choices
        self._forbidden = forbidden or {}

    def without(self, forbidden: Mapping[str, str]) -> _Because:
        """The same for a replay on which a limit speaks against these choices."""
        return _Because(self._planner, self._choices, forbidden)

    def names(self, plan: Plan) -> tuple[str, ...]:
        """The fields of `plan` that have a reason."""
        extend = plan.batch.mode is Mode.EXTEND
        tuned = self._planner.questions(plan.batch.mode)
        if self._planner.setting.profile.family == "v4":
            return tuned
        return (*tuned, *(name for name in DERIVED if extend or name != "dequantize_prefix"))

    def reason(self, plan: Plan, name: str) -> Reason:
        """Why the field `name` of `plan` has its value."""
        by = self._planner
        if name in DERIVED:
            return derived_reason(plan, name, by.baseline)
        if name in self._forbidden:
            why = self._forbidden[name]
            text = f"what the graph holds must not run on this batch: {why}"
            assert self._choices is not None
            held = str(self._choices[name].choice)
            return Reason(Verdict.NONE, "hard limits", {}, {}, {held: why}, text)
        choice = by.decide(plan.batch, name) if self._choices is None else self._choices[name]
        return certified(reason_of(choice, by.baseline, by.source), choice, by, plan.batch)
