"""The straight-line code of one point: hard limits, certain leads, then all times, then answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from nsa_tune.backend.dispatch.answering import AnswerCode, ArmCode, open_choices
from nsa_tune.backend.dispatch.decide import pick
from nsa_tune.backend.dispatch.leads import (
    Bounds,
    Contest,
    Lead,
    Standing,
    bounds_of,
    form_of,
    holding,
    leads,
    typical,
)
from nsa_tune.backend.dispatch.source import Scope, Writer, merged
from nsa_tune.backend.dispatch.tracing import (
    Expression,
    Leaf,
    SymbolicBatch,
    Trace,
    Tree,
    Untraceable,
    values,
)
from nsa_tune.backend.types.batch import Batch, Mode

if TYPE_CHECKING:
    from nsa_tune.backend.costmodel.policy import Candidate, Policy
    from nsa_tune.backend.types.point import Answer, Setting

__all__ = ["BODY", "Asked", "Kind", "PointCode", "Question"]

BODY = Scope({}, {}, 2)

Refusals: TypeAlias = Mapping[str, Sequence[Tree[object]]]
"""Of each arm what may forbid it, as trees of reasons."""


class Question(NamedTuple):
    """One question with the engine's own rule for it."""

    answer: Answer
    default: Callable[[Batch, Setting], str]


class Asked(NamedTuple):
    """A policy with the questions that it answers."""

    policy: Policy
    questions: tuple[Question, ...]

    def chosen(self, batch: Batch) -> tuple[str | None, ...]:
        """The choice for each question, in the slow way."""
        survey, setting = self.policy.survey(batch), self.policy.setting
        return tuple(
            pick(answer, survey, default(batch, setting))[0] for answer, default in self.questions
        )


class Kind(NamedTuple):
    """Which batches a function is for."""

    mode: Mode
    next_n: int
    has_lens: bool
    """Whether the length of each sequence is known, so that cost terms are made of those."""


class _Cost(NamedTuple):
    """What an arm costs: by its model, and what a cliff adds."""

    model: object
    more: Tree[float]


@dataclass(frozen=True, slots=True)
class PointCode:
    """The code that answers the questions of one point: a variable for each, named like it."""

    trace: Trace
    batch: SymbolicBatch
    writer: Writer
    asked: Asked
    kind: Kind
    number: int
    names: dict[str, object]
    """What the code may name."""

    def write(self) -> None:
        """Write the code; all of it the slow way where the point cannot be followed."""
        start = len(self.writer.lines)
        try:
            self._write(BODY._replace(facts=self.batch.facts))
        except Untraceable:
            del self.writer.lines[start:]
            self._ask(BODY)

    def _ask(self, scope: Scope) -> None:
        """Write a call that answers in the slow way."""
        name = f"ask_{self.number}"
        self.names[name] = self.asked.chosen
        answers = "".join(f"{question.answer.name}, " for question in self.asked.questions)
        self.writer.line(f"({answers}) = {name}(batch)", scope)

    def _write(self, scope: Scope) -> None:
        policy, batch = self.asked.policy, cast("Batch", self.batch)
        sheets = self.trace.follow(lambda: policy.point.sheet(batch, policy.setting))
        self.writer.fork(sheets, scope, self._sheet)

    def _sheet(self, sheet: int, scope: Scope) -> None:
        policy, setting = self.asked.policy, self.asked.policy.setting
        if isinstance(sheet, Expression) or sheet in policy.compiled.by_surfaces:
            self._ask(scope)
        elif not self.batch.has_lens:
            batch = cast("Batch", self.batch)
            used = self._used(sheet)

            def terms() -> tuple[float, ...]:
                every = policy.point.cost_terms(batch, setting)
                return tuple(term if i in used else 0 for i, term in enumerate(every))

            self.writer.fork(
                merged(self.trace.follow(terms, scope.facts)),
                scope,
                lambda found, at: self._arms(sheet, found, at),
            )
        else:
            width = len(policy.point.terms)
            local = [self.trace.node("local", f"x{self.number}_{i}") for i in range(width)]
            self.names.update({f"terms_{self.number}": policy.point.cost_terms, "setting": setting})
            targets = "".join(f"{one.arguments[0]}, " for one in local)
            self.writer.line(f"{targets} = terms_{self.number}(batch, setting)", scope)
            self._arms(sheet, local, scope)

    def _used(self, sheet: int) -> set[int]:
        """Which terms the models have that are asked for."""
        models = {
            one.name: one.models[sheet]
            for one in self.asked.policy.candidates
            if sheet in one.models
        }
        return {
            i
            for arm in self._compared([*models])
            for i, weight in enumerate(models[arm].weights)
            if weight
        }

    def _arms(self, sheet: int, terms: Sequence[float | Expression], scope: Scope) -> None:
        """Write the answers, with all models or, where a lead is certain, with fewer."""
        refusals = {
            one.name: self._refusals(one, sheet, scope) for one in self.asked.policy.candidates
        }
        stand, scope = self._standing(refusals, scope)
        for lead in self._leads(sheet, terms, {arm: refusals[arm] for arm in stand}, scope):
            if not lead.text:
                self._compare(sheet, terms, lead.standing(stand), scope)
                return
            self.writer.line(f"if {lead.text}:", scope)
            self._compare(sheet, terms, lead.standing(stand), scope.inside())
            self.writer.line("else:", scope)
            scope = scope.inside()
        self._compare(sheet, terms, stand, scope)

    def _standing(self, refusals: Refusals, scope: Scope) -> tuple[Standing, Scope]:
        """The arms that are not ruled out for every batch; what their limits share is written."""
        open_arms = {
            name: some
            for name, some in refusals.items()
            if self.writer.any_refusal(some, scope) is not True
        }
        conditions = {
            one.number: one
            for some in open_arms.values()
            for tree in some
            for one in self.writer.conditions(tree)
        }
        scope = self.writer.share([*conditions.values()], scope)
        limits = {name: self.writer.any_refusal(some, scope) for name, some in open_arms.items()}
        return {name: str(limit or "") for name, limit in limits.items()}, scope

    def _leads(
        self, sheet: int, terms: Sequence[float | Expression], refusals: Refusals, scope: Scope
    ) -> list[Lead]:
        """The leads that are worth asking for, best first."""
        if self.batch.has_lens:
            return []
        policy, batch = self.asked.policy, cast("Batch", self.batch)
        asked = [
            Contest(question.answer.choices, self._rule(question, scope))
            for question in self.asked.questions
        ]
        arms = [
            one
            for one in policy.candidates
            if one.name in refusals and any(contest.choice_of(one.name) for contest in asked)
        ]
        if not all(sheet in one.models for one in arms):
            return []
        bounds: Bounds = {}
        if (term_bounds := policy.point.term_bounds) is not None:
            tree = self.trace.follow(lambda: term_bounds(batch, policy.setting), scope.facts)
            bounds = bounds_of(terms, tree.value) if isinstance(tree, Leaf) else {}
        forms = {one.name: form_of(one.models[sheet].weights, terms) for one in arms}
        plain = scope._replace(names={})
        free = {
            one.name: self.writer.any_refusal(
                [*refusals[one.name], self._surcharged(one, scope)], plain
            )
            for one in arms
        }
        return leads(asked, forms, bounds, free, self._typical(scope))

    def _typical(self, scope: Scope) -> Sequence[Batch]:
        """Batches of which everything holds that is known here; any where there is none."""
        batches = typical(self.kind.mode, self.kind.next_n)
        return [batches[i] for i in holding(self.writer.known(scope), batches)] or batches

    def _compare(
        self, sheet: int, terms: Sequence[float | Expression], stand: Standing, scope: Scope
    ) -> None:
        """Write the arms' times and then the answers."""
        writer, candidates = self.writer, self.asked.policy.candidates
        possible = [one for one in candidates if one.name in stand]
        compared = self._compared([one.name for one in possible if sheet in one.models])
        costs = {
            one.name: self._cost(one, sheet, terms, scope)
            for one in possible
            if one.name in compared
        }
        models = [cost.model for cost in costs.values()]
        scope = writer.floats(models, writer.share(models, scope))
        times = self._times({one: stand[one] for one in costs}, costs, scope)
        arms = {
            one.name: ArmCode(stand[one.name], times.get(one.name), sheet in one.models)
            for one in possible
        }
        minima: dict[tuple[str, str], str] = {}
        for question in self.asked.questions:
            text = self._answer(question, arms, minima, scope)
            writer.line(f"{question.answer.name} = {text}", scope)

    def _cost(
        self, one: Candidate, sheet: int, terms: Sequence[float | Expression], scope: Scope
    ) -> _Cost:
        batch, setting = cast("Batch", self.batch), self.asked.policy.setting
        more = self.trace.follow(lambda: one.more_us(batch, setting), scope.facts)
        return _Cost(one.models[sheet].latency_us(cast("Sequence[float]", terms)), more)

    def _times(
        self, refusals: Mapping[str, str], costs: Mapping[str, _Cost], scope: Scope
    ) -> dict[str, str]:
        """Write the time of each arm; arms that are forbidden alike stand together."""
        writer = self.writer
        times = {name: writer.variable() for name in costs}
        for refusal in dict.fromkeys(refusals.values()):
            names = [name for name in costs if refusals[name] == refusal]
            at = scope
            if refusal:
                writer.line(f"if {refusal}:", scope)
                at = scope.inside()
                writer.line(f"{' = '.join(times[name] for name in names)} = inf", at)
                writer.line("else:", scope)
            at = writer.share([costs[name].model for name in names], at)
            for name in names:
                here = writer.share([costs[name].model], at)
                text = writer.value(costs[name].model, here)
                more = writer.select(costs[name].more, here, partial(writer.value, scope=here))
                writer.line(
                    f"{times[name]} = {text}{'' if more in ('0', '0.0') else f' + {more}'}", here
                )
        return times

    def _compared(self, measured: Sequence[str]) -> set[str]:
        """The arms whose time matters: those of questions that leave more than one choice."""
        found: set[str] = set()
        for question in self.asked.questions:
            choices = open_choices(question.answer, measured)
            if len(choices) > 1:
                found.update(arm for arms in choices.values() for arm in arms)
        return found

    def _refusals(self, candidate: Candidate, sheet: int, scope: Scope) -> list[Tree[object]]:
        """What may forbid the arm: trees of reasons."""
        batch, setting = cast("Batch", self.batch), self.asked.policy.setting
        checks: list[Callable[[], object]] = [
            lambda check=guard.check: check(batch, setting)  # type: ignore[misc]
            for guard in candidate.guards
        ]
        if candidate.failures is not None:
            if candidate.failures.wrong is not None:
                return [Leaf("wrong")]
            checks += [
                lambda box=box: True if box.holds(batch) else None  # type: ignore[misc]
                for box in candidate.failures.boxes.get(self.asked.policy.point.kin(sheet), ())
            ]
        # Each on its own: followed together they would branch without end.
        return [self.trace.follow(check, scope.facts) for check in checks]

    def _surcharged(self, candidate: Candidate, scope: Scope) -> Tree[object]:
        """Where a cliff adds something to the arm's model, as a tree of reasons."""
        batch, setting = cast("Batch", self.batch), self.asked.policy.setting

        def more() -> object:
            added = candidate.more_us(batch, setting)
            return None if not isinstance(added, Expression) and added == 0 else "behind a cliff"

        return self.trace.follow(more, scope.facts)

    def _answer(
        self, question: Question, arms: Mapping[str, ArmCode],
        minima: dict[tuple[str, str], str], scope: Scope,
    ) -> str:  # fmt: skip
        """The choice for one question, as an expression."""
        answer, rules = question.answer, self._rule(question, scope)
        known = [
            choice
            for choice, names in answer.choices.items()
            if any(one.name in names for one in self.asked.policy.candidates)
        ]
        return AnswerCode(self.writer, scope, answer, rules, known, arms, minima).text()

    def _rule(self, question: Question, scope: Scope) -> Tree[str]:
        """What the engine's rule takes."""
        batch, setting = cast("Batch", self.batch), self.asked.policy.setting
        rule = self.trace.follow(lambda: question.default(batch, setting), scope.facts)
        if any(isinstance(choice, Expression) for choice in values(rule)):
            raise Untraceable("a rule that computes its choice")
        return rule
