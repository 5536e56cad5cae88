"""Straight-line code for the decisions of one kind of batch.

Choosing by `pick` asks every guard, evaluates every cost term and compares every arm, which takes
a dozen microseconds in Python. All of that is arithmetic on a batch's sums, and the same for every
batch of a mode: so it is traced once (`tracing.py`) and written down as one function, with the
guards' own limits and the models' weights as constants. A point whose guards or terms cannot be
followed, or of which too little is measured, is asked in the slow way, which answers the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from nsa_tune.backend.answering import AnswerCode, ArmCode, open_choices
from nsa_tune.backend.batch import Batch, Mode
from nsa_tune.backend.plan import DECIDED, Plan, PlanDraft
from nsa_tune.backend.source import Scope, Writer
from nsa_tune.backend.tracing import (
    Expression,
    SymbolicBatch,
    Trace,
    Tree,
    Untraceable,
    values,
)
from nsa_tune.backend.verdict import pick

if TYPE_CHECKING:
    from nsa_tune.backend.point import Answer, Setting
    from nsa_tune.backend.policy import Candidate, Policy

__all__ = ["Asked", "Kind", "Question", "choice_function", "plan_function"]

_BODY = Scope({}, {}, 2)


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


def plan_function(
    asked: Sequence[Asked],
    kind: Kind,
    held: Mapping[tuple[object, ...], tuple[object, ...]],
    slow: Callable[[Batch], Plan],
    other: Callable[[Batch], Plan],
) -> Callable[[Batch], Plan] | None:
    """The function from a batch of this kind to its plan; None when it cannot be written.

    Batches whose lengths are known, where the kind has none, or not known go to `other`.
    `held` has what a plan holds besides its batch, by the choices and, in extend, by `facts_of`.
    Outside of extend the batch must not be captured.
    """
    names = [question.answer.name for one in asked for question in one.questions]
    key = "".join(f"{name}, " for name in names)
    if kind.mode is Mode.EXTEND:
        topk = asked[0].policy.setting.profile.index_topk if asked else 0
        key += f"batch.kv_tokens > batch.q_tokens, batch.max_kv <= {topk}"
    tail = [
        "plan = Draft()",
        "plan.batch = batch",
        f"{', '.join(f'plan.{name}' for name in (*DECIDED, '_origin'))} = held[{key}]",
        "plan.__class__ = Plan",
        "return plan",
    ]
    known: dict[str, object] = {
        "Draft": PlanDraft,
        "Plan": Plan,
        "held": held,
    }
    known |= {"slow": slow, "other": other}
    head = [f"if batch.kv_lens is {_absent(kind)}: return other(batch)"]
    return _function(asked, kind, tail, known, head) if asked else None


def choice_function(
    policy: Policy, question: Question, kind: Kind, slow: Callable[[Batch], str | None]
) -> Callable[[Batch], str | None] | None:
    """The function from a batch to the choice for one question; the slow way for other kinds."""
    other = f"batch.mode is not mode or batch.kv_lens is {_absent(kind)}"
    if kind.mode is not Mode.EXTEND:
        other += f" or batch.next_n != {kind.next_n} or batch.captured"
    return _function(
        [Asked(policy, (question,))],
        kind,
        [f"return {question.answer.name}"],
        {"slow": slow, "mode": kind.mode},
        [f"if {other}: return slow(batch)"],
    )


def _absent(kind: Kind) -> str:
    return "None" if kind.has_lens else "not None"


def _function(
    asked: Sequence[Asked], kind: Kind, tail: Sequence[str], names: Mapping[str, object],
    head: Sequence[str] = (),
) -> Callable[[Batch], Any] | None:  # fmt: skip
    trace = Trace()
    # A captured size has a plan of its own, except in extend.
    captured = None if kind.mode is Mode.EXTEND else False
    batch = SymbolicBatch(trace, kind.mode, kind.next_n, captured, kind.has_lens)
    writer = Writer(trace)
    helpers: dict[str, object] = {"inf": inf, **names}
    for line in head:
        writer.line(line, _BODY)
    for i, one in enumerate(asked):
        _PointCode(trace, batch, writer, one, i, helpers).write()
    try:
        return writer.function(tail, helpers)
    except Untraceable:
        return None


class _Cost(NamedTuple):
    """What an arm costs: by its model, and what a cliff adds."""

    model: object
    more: Tree[float]


@dataclass(frozen=True, slots=True)
class _PointCode:
    """The code that answers the questions of one point: a variable for each, named like it."""

    trace: Trace
    batch: SymbolicBatch
    writer: Writer
    asked: Asked
    number: int
    names: dict[str, object]
    """What the code may name."""

    def write(self) -> None:
        """Write the code; all of it the slow way where the point cannot be followed."""
        start = len(self.writer.lines)
        try:
            self._write(_BODY._replace(facts=self.batch.facts))
        except Untraceable:
            del self.writer.lines[start:]
            self._ask(_BODY)

    def _ask(self, scope: Scope) -> None:
        """Write a call that answers in the slow way."""
        name = f"ask_{self.number}"
        self.names[name] = self.asked.chosen
        answers = "".join(f"{question.answer.name}, " for question in self.asked.questions)
        self.writer.line(f"({answers}) = {name}(batch)", scope)

    def _write(self, scope: Scope) -> None:
        policy, batch = self.asked.policy, cast("Batch", self.batch)
        sheets = self.trace.follow(lambda: policy.point.sheet(batch))
        self.writer.fork(sheets, scope, self._sheet)

    def _sheet(self, sheet: int, scope: Scope) -> None:
        policy, setting = self.asked.policy, self.asked.policy.setting
        if isinstance(sheet, Expression) or sheet in policy.compiled.by_surfaces:
            self._ask(scope)
        elif not self.batch.has_lens:
            batch = cast("Batch", self.batch)
            terms = self.trace.follow(lambda: policy.point.cost_terms(batch, setting), scope.facts)
            self.writer.fork(terms, scope, lambda found, at: self._arms(sheet, found, at))
        else:
            width = len(policy.point.terms)
            local = [self.trace.node("local", f"x{self.number}_{i}") for i in range(width)]
            self.names.update({f"terms_{self.number}": policy.point.cost_terms, "setting": setting})
            targets = "".join(f"{one.arguments[0]}, " for one in local)
            self.writer.line(f"{targets} = terms_{self.number}(batch, setting)", scope)
            self._arms(sheet, local, scope)

    def _arms(self, sheet: int, terms: Sequence[float | Expression], scope: Scope) -> None:
        """Write the arms' times and then the answers."""
        writer, candidates = self.writer, self.asked.policy.candidates
        refusals = {one.name: self._refusal(one, sheet, scope) for one in candidates}
        possible = [one for one in candidates if refusals[one.name] is not True]
        compared = self._compared([one.name for one in possible if sheet in one.models])
        costs = {
            one.name: self._cost(one, sheet, terms, scope)
            for one in possible
            if one.name in compared
        }
        scope = writer.share([cost.model for cost in costs.values()], scope)
        times = self._times({one: str(refusals[one] or "") for one in costs}, costs, scope)
        arms = {
            one.name: ArmCode(
                str(refusals[one.name] or ""), times.get(one.name), sheet in one.models
            )
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
                text = writer.value(costs[name].model, at)
                more = writer.select(costs[name].more, at, partial(writer.value, scope=at))
                writer.line(
                    f"{times[name]} = {text}{'' if more in ('0', '0.0') else f' + {more}'}", at
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

    def _refusal(self, candidate: Candidate, sheet: int, scope: Scope) -> bool | str:
        """Whether the arm is forbidden, as a condition where that depends on the batch."""
        batch, setting = cast("Batch", self.batch), self.asked.policy.setting
        checks: list[Callable[[], object]] = [
            lambda check=guard.check: check(batch, setting)  # type: ignore[misc]
            for guard in candidate.guards
        ]
        if candidate.failures is not None:
            if candidate.failures.wrong is not None:
                return True
            checks += [
                lambda box=box: True if box.holds(batch) else None  # type: ignore[misc]
                for box in candidate.failures.boxes.get(sheet, ())
            ]
        # Each on its own: followed together they would branch without end.
        trees = [self.trace.follow(check, scope.facts) for check in checks]
        return self.writer.any_refusal(trees, scope)

    def _answer(
        self, question: Question, arms: Mapping[str, ArmCode],
        minima: dict[tuple[str, str], str], scope: Scope,
    ) -> str:  # fmt: skip
        """The choice for one question, as an expression."""
        answer, setting = question.answer, self.asked.policy.setting
        rules = self.trace.follow(
            lambda: question.default(cast("Batch", self.batch), setting), scope.facts
        )
        if any(isinstance(rule, Expression) for rule in values(rules)):
            raise Untraceable("a rule that computes its choice")
        known = [
            choice
            for choice, names in answer.choices.items()
            if any(one.name in names for one in self.asked.policy.candidates)
        ]
        return AnswerCode(self.writer, scope, answer, rules, known, arms, minima).text()
