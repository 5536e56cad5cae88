"""The answer to one question as an expression of code: hard limits first, then times, then rules.

It says of text what `verdict.settle` says of numbers, and takes from there what is chosen where
nothing is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nsa_tune.backend.dispatch.decide import MARGIN, settle
from nsa_tune.backend.dispatch.source import Scope, Writer
from nsa_tune.backend.dispatch.tracing import Leaf, Tree, Untraceable

if TYPE_CHECKING:
    from nsa_tune.backend.types.point import Answer

__all__ = ["AnswerCode", "ArmCode", "open_choices"]

_AHEAD = repr(1 + MARGIN)
_MOST_LIMITS = 5


class ArmCode(NamedTuple):
    """An arm that is not ruled out for every batch."""

    limits: str
    """Condition under which it is forbidden; "" if never. Arms with the same are alike."""
    time: str | None
    """The variable with its time, infinite where it is forbidden; None when none is needed."""
    measured: bool

    @property
    def refusal(self) -> str:
        """The condition under which it is forbidden, as it is quickest to ask."""
        return self.limits and (self.limits if self.time is None else f"{self.time} == inf")


def open_choices(
    answer: Answer, arms: Mapping[str, object] | Sequence[str]
) -> dict[str, list[str]]:
    """The choices with an arm among `arms`, and these arms."""
    found = {
        choice: [name for name in names if name in arms] for choice, names in answer.choices.items()
    }
    return {choice: names for choice, names in found.items() if names}


@dataclass(frozen=True, slots=True)
class AnswerCode:
    """The code that answers one question at one place of a function."""

    writer: Writer
    scope: Scope
    answer: Answer
    rules: Tree[str]
    """What the engine's rule takes."""
    known: Sequence[str]
    """The choices that the device has an arm for, allowed or not."""
    arms: Mapping[str, ArmCode]
    minima: dict[tuple[str, str], str]
    """Variables that this place has for the smaller of two others; new ones are added."""

    def text(self) -> str:
        """The choice, as an expression; what that needs is written before it.

        Raises:
            Untraceable: when too many limits differ.
        """
        choices = {
            choice: self._telling(names)
            for choice, names in open_choices(self.answer, self.arms).items()
        }
        if not choices:
            return self._settled([], [])
        measured = [self.arms[name].measured for names in choices.values() for name in names]
        if not all(measured) and (len(choices) > 1 or any(measured)):
            return self._by_cases(choices)
        forbidden = [self.arms[name].refusal for names in choices.values() for name in names]
        closed = self._settled([], []) if all(forbidden) else ""
        if len(choices) > 1:
            return self._least(choices, closed)
        only = self._settled([*choices], [*choices] if all(measured) else [])
        if not closed or closed == only:
            return only
        return f"{closed} if {' and '.join(f'({one})' for one in forbidden)} else {only}"

    def _telling(self, names: Sequence[str]) -> list[str]:
        """Of a choice's arms those that matter: one without a time does not where another with
        one is allowed whenever it is."""
        allowed = {one.limits for one in map(self.arms.__getitem__, names) if one.measured}
        found = []
        for name in names:
            arm = self.arms[name]
            if arm.measured or not allowed & {"", arm.limits}:
                found.append(name)
        return found

    def _settled(self, allowed: Sequence[str], timed: Sequence[str]) -> str:
        """What is taken where nothing is compared: that depends on the rule alone."""
        times = dict.fromkeys(timed, 1.0)
        return self.writer.select(
            self.rules,
            self.scope,
            lambda rule: repr(settle(self.answer, lambda: self.known, allowed, times, rule)[0]),
        )

    # --- every arm has a time

    def _least(self, choices: Mapping[str, Sequence[str]], closed: str) -> str:
        """The choice with the least time; of those that tie the rule's, or else the first.

        `closed` is what is taken where all are forbidden; "" where that cannot be.
        """
        costs = self._costs(choices)
        if len(costs) == 2:
            return self._of_two(costs, closed)
        limit = self._limit(costs)
        text = self._within(costs, limit)
        return f"{closed} if {limit} == inf else {text}" if closed else text

    def _costs(self, choices: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Write the time of each choice: its fastest arm's, infinite where all are forbidden."""
        costs: dict[str, str] = {}
        for choice, names in choices.items():
            times = [str(self.arms[name].time) for name in names if self.arms[name].measured]
            if times:
                costs[choice] = self._minimum(times)
        return costs

    def _minimum(self, times: Sequence[str]) -> str:
        """The variable with the least of `times`, written where there are several."""
        least = times[0]
        for time in times[1:]:
            # A call of `min` takes ten times as long.
            shorter = self.minima.get((least, time))
            if shorter is None:
                shorter = self.minima[least, time] = self.writer.variable()
                text = f"{shorter} = {least} if {least} <= {time} else {time}"
                self.writer.line(text, self.scope)
            least = shorter
        return least

    def _limit(self, costs: Mapping[str, str]) -> str:
        """Write the time up to which a choice ties with the best."""
        least, limit = self._minimum(list(costs.values())), self.writer.variable()
        self.writer.line(f"{limit} = {least} * {_AHEAD}", self.scope)
        return limit

    def _within(self, costs: Mapping[str, str], limit: str) -> str:
        """The rule's choice if it ties with the best, or else the first that does."""

        def taken(rule: str) -> str:
            order = [rule, *(name for name in costs if name != rule)] if rule in costs else [*costs]
            tests = [f"{name!r} if {costs[name]} <= {limit} else " for name in order[:-1]]
            return f"({''.join(tests)}{order[-1]!r})"

        return self.writer.select(self.rules, self.scope, taken)

    def _of_two(self, costs: Mapping[str, str], closed: str) -> str:
        (first, a), (second, b) = costs.items()
        tied = self.writer.select(
            self.rules, self.scope, lambda rule: repr(second if rule == second else first)
        )
        if isinstance(self.rules, Leaf) or tied in (repr(first), repr(second)):
            if tied == repr(second):
                first, a, second, b = second, b, first, a
            text = f"({first!r} if {a} < inf else {closed})" if closed else repr(first)
            return f"{text} if {a} <= {b} * {_AHEAD} else {second!r}"
        if closed:
            tied = f"({closed} if {a} == inf else {tied})"
        return (
            f"{first!r} if {b} > {a} * {_AHEAD} else {second!r} if {a} > {b} * {_AHEAD} else {tied}"
        )

    # --- some have none

    def _by_cases(self, choices: Mapping[str, Sequence[str]]) -> str:
        """The choice where some arms have no time: what is allowed decides who is compared."""
        arms = {choice: [self.arms[name] for name in names] for choice, names in choices.items()}
        timed = {
            choice: names
            for choice, names in choices.items()
            if any(arm.measured for arm in arms[choice])
        }
        costs, limit = {}, ""
        if len(timed) > 1:
            costs = self._costs(timed)
            limit = self._limit(costs)
        for choice, cost in costs.items():
            if all(arm.measured for arm in arms[choice]):
                # Its arms are forbidden together when its time is infinite.
                closed = f"{cost} == inf" if all(arm.limits for arm in arms[choice]) else ""
                arms[choice] = [ArmCode(closed, cost, measured=True)]
        tests: dict[str, str] = {}
        for arm in (arm for some in arms.values() for arm in some):
            if arm.limits and (arm.limits not in tests or arm.time is not None):
                tests[arm.limits] = arm.refusal
        if len(tests) > _MOST_LIMITS:
            raise Untraceable("too many limits")

        def case(refused: frozenset[str], asked: Sequence[str]) -> str:
            if not asked:
                return self._case(arms, costs, limit, refused)
            yes, no = case(refused | {asked[0]}, asked[1:]), case(refused, asked[1:])
            return yes if yes == no else f"({yes} if {tests[asked[0]]} else {no})"

        return case(frozenset(), list(tests))

    def _case(
        self, arms: Mapping[str, Sequence[ArmCode]], costs: Mapping[str, str], limit: str,
        refused: frozenset[str],
    ) -> str:  # fmt: skip
        """The choice where the arms with the limits `refused` are forbidden, and no others."""
        allowed = {
            choice: [arm for arm in some if arm.limits not in refused]
            for choice, some in arms.items()
        }
        timed = [choice for choice, some in allowed.items() if any(arm.measured for arm in some)]
        if len(timed) > 1:
            return self._within({choice: costs[choice] for choice in timed}, limit)
        return self._settled([choice for choice, some in allowed.items() if some], timed)
