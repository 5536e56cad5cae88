"""TablePlanner: the plans of one table. A dispatcher holds one, and swaps it on reload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from math import exp, log
from typing import Any, NamedTuple

from nsa_tune._errors import UnknownName
from nsa_tune.backend.baselines import Baseline
from nsa_tune.backend.baselines.baseline import Choose
from nsa_tune.backend.costmodel.policy import Part, Policy
from nsa_tune.backend.dispatch.decide import Choice, Verdict, decide, decide_for_all, pick
from nsa_tune.backend.dispatch.evidence import certified
from nsa_tune.backend.dispatch.explain import derived_reason, reason_of
from nsa_tune.backend.dispatch.plan import (
    DECIDED,
    DERIVED,
    TUNED,
    Derived,
    Origin,
    Plan,
    Reason,
    coupled,
    facts_of,
)
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.lengths import MAX_TOKENS
from nsa_tune.backend.types.point import Question, Setting
from nsa_tune.backend.types.records import Table

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


class _Asked(NamedTuple):
    """What is asked of one policy."""

    policy: Policy
    part: Part
    """What the answers depend on."""
    forced: str | None
    """The arm that is taken where it is allowed."""
    questions: tuple[tuple[Question, Choose], ...]
    """Each with what the engine's baseline takes."""


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
        table: Table | None = None,
        forced: Mapping[str, str] | None = None,
    ) -> None:
        """`forced` has for a point the arm that is taken where it is allowed; `table` are the
        measurements behind the policies, None where the engine's baseline answers."""
        self.setting = setting
        self.source = source
        self.match = match
        self.baseline = baseline
        self.table = table
        self.key = None if table is None else table.key
        self.forced = dict(forced or {})
        self.policies = {policy.point.name: policy for policy in policies}
        asked = [self._asked(policy, policy.point.questions) for policy in self.policies.values()]
        self._by_mode = {
            mode: tuple(part for part in asked if mode in part.policy.point.modes) for mode in Mode
        }
        self._origin = _Because(self, None)

    def _asked(self, policy: Policy, questions: Sequence[Question]) -> _Asked:
        chooser, setting = self.baseline.chooser, self.setting
        return _Asked(
            policy,
            policy.part(questions),
            self.forced.get(policy.point.name),
            tuple((question, chooser(question, setting)) for question in questions),
        )

    # --- plans

    def plan(self, batch: Batch) -> Plan:
        """The plan of any batch as its own, captured or not."""
        return self._plan(batch, chosen(self._by_mode[batch.mode], batch), self._origin)

    def _plan(self, batch: Batch, chosen: Mapping[str, str | None], origin: Origin) -> Plan:
        if self.setting.profile.has_indexer:
            derived = coupled(
                batch.mode, self.setting.layout, chosen.get("prefill_path"),
                chosen.get("sparse_prefill"), *facts_of(batch, self.setting.profile.index_topk),
                chosen.get("decode"),
            )  # fmt: skip
        else:
            derived = Derived(None, None, False)
        fields: dict[str, Any] = dict.fromkeys(DECIDED)
        fields.update(chosen)
        fields.update(derived._asdict())
        return Plan(batch=batch, _origin=origin, **fields)

    def choosers(
        self, names: tuple[str, ...], mode: Mode
    ) -> Callable[[Batch], tuple[str | None, ...]]:
        """As `Dispatcher.choosers`: batches of another mode take longer."""
        questions: dict[str, list[Question]] = {}
        for name in names:
            policy, question = self.question(mode, name)
            questions.setdefault(policy.point.name, []).append(question)
        asked = [self._asked(self.policies[name], asks) for name, asks in questions.items()]
        own_graph = mode is not Mode.EXTEND

        def choose(batch: Batch) -> tuple[str | None, ...]:
            if batch.mode is not mode or (batch.captured and own_graph):
                plan = self.plan(batch)
                return tuple(getattr(plan, name) for name in names)
            choices = chosen(asked, batch)
            return tuple([choices[name] for name in names])

        return choose

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
        for policy, _, forced, questions in self._by_mode[mode]:
            for question, default in questions:
                choices[question.name] = decide_for_all(
                    question, policy, batches, default, weights=weights, forced=forced
                )
        taken = {name: choice.choice for name, choice in choices.items()}
        return self._plan(equal[-1], taken, _Because(self, choices))

    def replayed(self, plan: Plan, batch: Batch) -> Plan:
        """A captured size's `plan` for one replay, without what a limit forbids on `batch`."""
        forbidden = {}
        for policy, part, _, questions in self._by_mode[batch.mode]:
            survey = policy.survey_of(part, batch)
            for question, _ in questions:
                arms = question.choices.get(getattr(plan, question.name), ())
                reasons = [survey.forbidden[arm] for arm in arms if arm in survey.forbidden]
                if reasons and survey.latencies.keys().isdisjoint(arms):
                    forbidden[question.name] = reasons[0]
        kept = {name: getattr(plan, name) for name in TUNED if name not in forbidden}
        assert isinstance(plan._origin, _Because)
        return self._plan(batch, kept, _Because(self, plan._origin.choices, forbidden))

    def _spaced(self, mode: Mode, batch_size: int, next_n: int) -> set[int]:
        """Contexts spread evenly in octaves over the measured range."""
        fitted = [asked.policy.fitted for asked in self._by_mode[mode]]
        extents = [policy.extent for policy in fitted if policy.extent]
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
        lacking = {name: policy.unmeasured for name, policy in self.policies.items()}
        return {name: arms for name, arms in lacking.items() if arms}

    def questions(self, mode: Mode) -> tuple[str, ...]:
        """The tuned fields of a plan for `mode`."""
        return tuple(
            question.name for asked in self._by_mode[mode] for question, _ in asked.questions
        )

    def decide(self, batch: Batch, name: str) -> Choice:
        """As `Dispatcher.decide`."""
        policy, question = self.question(batch.mode, name)
        default = self.baseline.choose(question, batch, self.setting)
        return decide(question, policy, batch, default, self.forced.get(policy.point.name))

    def question(self, mode: Mode, name: str) -> tuple[Policy, Question]:
        """The question called `name`, and the policy that answers it.

        Raises:
            UnknownName: when the mode has no such question.
        """
        for policy, _, _, questions in self._by_mode[mode]:
            for question, _ in questions:
                if question.name == name:
                    return policy, question
        raise UnknownName.of(f"question in {mode}", name, list(self.questions(mode)))


def chosen(asked: Iterable[_Asked], batch: Batch) -> dict[str, str | None]:
    """The choice for each question that is asked: everything that decides comes through here or
    through the same `pick` in `decide`."""
    choices: dict[str, str | None] = {}
    for policy, part, forced, questions in asked:
        survey = policy.survey_of(part, batch)
        for question, default in questions:
            open_choices = policy.choices[question.name]
            choices[question.name], _ = pick(question, survey, default(batch), forced, open_choices)
    return choices


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
        """`forbidden` are those of the choices that a limit speaks against on a replay."""
        self._planner = planner
        self.choices = choices
        self._forbidden = forbidden or {}

    def names(self, plan: Plan) -> tuple[str, ...]:
        """The fields of `plan` that have a reason."""
        extend = plan.batch.mode is Mode.EXTEND
        tuned = self._planner.questions(plan.batch.mode)
        if self._planner.setting.profile.family != "dsa":
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
            assert self.choices is not None
            held = str(self.choices[name].choice)
            return Reason(Verdict.NONE, "hard limits", {}, {}, {held: why}, text)
        choice = by.decide(plan.batch, name) if self.choices is None else self.choices[name]
        return certified(reason_of(choice, by.baseline, by.source), choice, by, plan.batch)
