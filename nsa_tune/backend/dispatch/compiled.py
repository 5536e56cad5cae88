"""A table's decisions as one function of a batch.

The function computes each arm's time from the formulas that its point declares and the weights
that were fitted: `inf` where a limit forbids the arm. Of each question it notes which choices are
within the margin of the best. Those notes, the key, decide, and not the times: `decide.settle` says
once for each key what it comes to.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from nsa_tune.backend.costmodel.regret import MARGIN
from nsa_tune.backend.dispatch.decide import settle
from nsa_tune.backend.types.formula import (
    NO_ROWS,
    Switch,
    assignments,
    defined,
    fields_of,
    names_in,
)

if TYPE_CHECKING:
    from nsa_tune.backend.baselines import Baseline
    from nsa_tune.backend.costmodel.policy import Candidate, Policy
    from nsa_tune.backend.types.batch import Batch
    from nsa_tune.backend.types.point import Question

__all__ = ["Decisions", "Key"]

Key: TypeAlias = tuple[Any, ...]


class Decisions:
    """The code that answers `questions` of the points of `policies`, and what its keys mean."""

    def __init__(
        self, policies: Iterable[Policy], baseline: Baseline, questions: Sequence[Question]
    ) -> None:
        self._points = [
            _Point(number, policy, own, baseline)
            for number, policy in enumerate(policies)
            if (own := [one for one in policy.point.questions if one in questions])
        ]

    def function(
        self, head: Sequence[str], facts: Sequence[str], tail: Sequence[str],
        names: Mapping[str, Any], fields: Mapping[str, str], attributes: Sequence[str] = (),
    ) -> Callable[[Batch], Any]:  # fmt: skip
        """The function that begins with `head`, computes `key` and ends with `tail`.

        The formulas `facts` end the key. A batch without a query, or in a regime where surfaces
        decide, is for `slow`, which is one of `names`. `fields` of all batches are known, and
        `attributes` are what `tail` sets.
        """
        own = [line for point in self._points for line in point.lines] or ["pass"]
        lines = ["try:", *_indented(own)]
        # As asking everything: what a point cannot compute leaves it to the baseline.
        lines += ["except (ArithmeticError, ValueError):", "    return slow(batch)"]
        parts = [*(part for point in self._points for part in point.key), *facts]
        lines.append(f"key = ({''.join(f'{part}, ' for part in parts)})")
        lines = [f"if {NO_ROWS}:", "    return slow(batch)", *lines]
        body = [*head, *fields_of(lines, fields), *lines, *tail]
        source = "\n".join(["def planned(batch):", *_indented(body), ""])
        names = {**self._functions(), **names}
        function: Callable[[Batch], Any] = defined(source, "planned", names, attributes)
        return function

    def _functions(self) -> dict[str, Any]:
        found: dict[str, Any] = {"ArithmeticError": ArithmeticError, "ValueError": ValueError}
        for point in self._points:
            for name, function in point.functions.items():
                if found.setdefault(name, function) is not function:
                    raise ValueError(f"two points mean different functions by {name}")
        return found

    def choices(self, key: Key) -> dict[str, str | None]:
        """The choice for each question."""
        found: dict[str, str | None] = {}
        start = 0
        for point in self._points:
            part = dict(zip(point.key, key[start:], strict=False))
            start += len(part)
            for noted, name in zip(
                point.noted[part.get(point.regime, 0)], point.notes, strict=True
            ):
                switch = noted.baseline
                switched = isinstance(switch, Switch) and part[switch.condition]
                found[noted.question.name] = noted.choice(part[name], switched)
        return found


class _Noted(NamedTuple):
    """What a key's note of one question means in one regime.

    The note is 0 or 1 for the first or second of `timed` where that is ahead of all others by more
    than the margin. Otherwise it is a tuple of flags: for each of `timed` whether it is within the
    margin of the best, then for each of `allowed` whether it is allowed, and for each of `partly`
    whether an arm with a time is.
    """

    question: Question
    timed: tuple[str, ...]
    """Choices with a time."""
    allowed: tuple[str, ...]
    """Choices that are asked for; empty where all have times."""
    partly: tuple[str, ...]
    """Choices that have arms without a time too."""
    known: tuple[str, ...]
    """Choices that this device has an arm for."""
    baseline: str | Switch

    def choice(self, note: int | tuple[bool, ...], switched: bool) -> str | None:
        """What is taken; `switched` is the condition of the baseline's switch."""
        flags = note if isinstance(note, tuple) else [i == note for i in range(len(self.timed))]
        near = [name for name, flag in zip(self.timed, flags, strict=False) if flag]
        costs, allowed = dict.fromkeys(near, 1.0), set(near)
        may = flags[len(self.timed) :]
        if may:
            by_name = [*self.allowed, *self.partly]
            allowed = {name for name, flag in zip(self.allowed, may, strict=False) if flag}
            untimed = {name for name, flag in zip(by_name, may, strict=True) if not flag}
            # Those with a time that are not near the best; how far they are decides nothing.
            far = [name for name in self.timed if name not in costs and name not in untimed]
            costs |= dict.fromkeys(far, inf)
        order = [name for name in self.question.choices if name in allowed]
        in_order = {name: costs[name] for name in order if name in costs}
        default = self.baseline
        if isinstance(default, Switch):
            default = default.yes if switched else default.no
        return settle(self.question, lambda: self.known, order, in_order, default)[0]


class _Point:
    """The code of one point: lines, and the formulas of its part of the key."""

    def __init__(
        self, number: int, policy: Policy, questions: Sequence[Question], baseline: Baseline
    ) -> None:
        self._policy = policy
        self._questions = questions
        self._baseline = baseline
        self._formulas = policy.features.formulas
        self.functions = self._formulas.functions
        self._assigned: dict[tuple[str, ...], list[str]] = {}
        self.noted: list[tuple[_Noted, ...]] = []
        """By the number of a regime, which begins the point's part of a key."""
        asked = {arm for one in questions for arms in one.choices.values() for arm in arms}
        arms = [one for one in policy.candidates if one.name in asked and not _is_wrong(one)]
        self._numbers = {one.name: i for i, one in enumerate(arms)}
        self._paths: dict[str, list[Candidate]] = {}
        for one in arms:
            self._paths.setdefault(one.name.rpartition("/")[0], []).append(one)
        self.notes = [f"note_{number}_{i}" for i in range(len(questions))]
        self.regime = f"regime_{number}"
        self._may: dict[str, str] = {}
        """By arm: the variable that says whether it is allowed, "True" where it always is."""
        limits = self._limits()
        by_regime = self._by_regime()
        switches = {
            one.baseline.condition: None
            for one in self.noted[0]
            if isinstance(one.baseline, Switch)
        }
        self.key = [*([self.regime] if len(self.noted) > 1 else []), *self.notes, *switches]
        formula = self._formulas.regime
        regime = [*assignments(self._formulas.values, [formula], ()), f"regime = {formula}"]
        used = names_in("\n".join([*limits, *by_regime]))
        self.lines = [*(regime if "regime" in used else ()), *limits, *by_regime]

    # --- limits

    def _limits(self) -> list[str]:
        """Lines that say whether any arm (`any`), a path (`path_0`) or an arm (`may_0`) is allowed;
        only those that differ."""
        limits = {one.name: self._limits_of(one) for arms in self._paths.values() for one in arms}
        lines: list[str] = []

        def named(name: str, within: str, forbidden: Sequence[str]) -> str:
            if not forbidden:
                return within
            also = "" if within == "True" else f"{within} and "
            lines.append(f"{name} = {also}{_none_of(forbidden)}")
            return name

        every = _common(limits.values())
        some = named("some", "True", every)
        for number, arms in enumerate(self._paths.values()):
            path = _common(limits[one.name] for one in arms)
            allowed = named(f"path_{number}", some, [one for one in path if one not in every])
            self._may |= {f"path {number}": allowed}
            for one in arms:
                own = [limit for limit in limits[one.name] if limit not in path]
                self._may[one.name] = named(f"may_{self._numbers[one.name]}", allowed, own)
        return lines

    def _limits_of(self, one: Candidate) -> list[str]:
        """What forbids the arm: its limits, and where it failed when it was measured."""
        found = [limit.passed for limit in one.limits if limit.passed != NO_ROWS]
        if one.failures is not None:
            alike = self._policy.point.regimes_alike
            for kin, boxes in one.failures.boxes.items():
                found += [f"regime // {alike} == {kin} and {box.formula}" for box in boxes]
        return list(dict.fromkeys(found))

    # --- regimes

    def _by_regime(self) -> list[str]:
        by_surfaces = self._policy.fitted.by_surfaces
        models = (one.models for one in self._policy.candidates)
        measured = sorted({regime for some in models for regime in some} - by_surfaces)
        formulas = self._formulas
        every = frozenset({0}) if formulas.regime == "0" else formulas.regimes
        covered = every is not None and bool(measured) and every <= {*measured, *by_surfaces}
        rest = [] if covered else [None]
        blocks = [self._times(regime) for regime in (*measured, *rest)]
        several, by_path, lines = self._shared(blocks)
        for regime in sorted(by_surfaces):
            lines += [f"if regime == {regime}:", "    return slow(batch)"]
        written = [
            self._in_regime(times, several, by_path, alone=len(blocks) == 1) for times in blocks
        ]
        if len(written) == 1:
            return [*lines, *written[0]]
        tests = [f"{'elif' if i else 'if'} regime == {one}:" for i, one in enumerate(measured)]
        tests = [*tests, "else:"][: len(written)]
        # What is neither of the others needs no question.
        tests[-1] = "else:"
        for test, block in zip(tests, written, strict=True):
            lines += [test, *_indented(block)]
        return lines

    def _shared(
        self, blocks: Sequence[Mapping[str, str]]
    ) -> tuple[list[str], dict[int, list[str]], list[str]]:
        """What comes before the regimes: the values that every one of them needs, those of several
        paths, and those of each path, which are there where it is allowed; and all the lines."""
        timed = [block for block in blocks if block]
        if not timed:
            return [], {}, []
        several = _common(map(self._values_of_several_paths, timed))
        by_path: dict[int, list[str]] = {}
        lines = [*several]
        if len(timed) < 2:
            return several, by_path, lines
        for number, arms in enumerate(self._paths.values()):
            needs = [
                self._values(block[one.name] for one in arms if one.name in block)
                for block in timed
            ]
            common = [line for line in _common(needs) if line not in several]
            allowed = self._may[f"path {number}"]
            by_path[number] = common
            if common and allowed != "True":
                lines += [f"if {allowed}:", *_indented(common)]
            else:
                lines += common
        return several, by_path, lines

    def _in_regime(
        self, times: Mapping[str, str], several: Sequence[str],
        by_path: Mapping[int, Sequence[str]], *, alone: bool,
    ) -> list[str]:  # fmt: skip
        """Lines that make the notes for batches of one regime, by the `times` of its arms; values
        of `several` paths are there already, and those `by_path`."""
        noted = {
            name: self._noted(question, times)
            for name, question in zip(self.notes, self._questions, strict=True)
        }
        lines = [line for line in self._values_of_several_paths(times) if line not in several]
        before = [*several, *lines]
        costs: dict[frozenset[str], str] = {}
        left = dict(noted)
        for number, arms in enumerate(self._paths.values()):
            own = {
                name: left.pop(name)
                for name, one in noted.items()
                if name in left and self._arms_of(one) <= {arm.name for arm in arms}
            }
            names = [one.name for one in arms]
            there = [*before, *by_path.get(number, ())]
            lines += self._path(number, names, times, there, own, left, costs)
        for name, one in left.items():
            lines.append(f"{name} = {self._note(one, times, _Minima(lines, costs))}")
        number = len(self.noted)
        self.noted.append(tuple(noted.values()))
        return lines if alone else [*lines, f"{self.regime} = {number}"]

    def _times(self, regime: int | None) -> dict[str, str]:
        """The formula of each arm that has a time in the regime."""
        found = {}
        for one in self._policy.candidates:
            model = None if regime is None else one.models.get(regime)
            if model is not None and one.name in self._numbers:
                *weights, constant = model.weights
                parts = zip(weights, self._formulas.features, strict=True)
                terms = [repr(constant), *(f"{w!r} * {name}" for w, name in parts if w)]
                found[one.name] = " + ".join(
                    [*terms, *([f"({one.surcharge})"] if one.surcharge else [])]
                )
        return found

    def _values_of_several_paths(self, times: Mapping[str, str]) -> list[str]:
        counts = Counter[str]()
        for arms in self._paths.values():
            counts.update(self._values(times[one.name] for one in arms if one.name in times))
        return [line for line in self._values(times.values()) if counts[line] > 1]

    def _values(self, formulas: Iterable[str]) -> list[str]:
        """The lines that assign what the formulas need."""
        key = tuple(formulas)
        if key not in self._assigned:
            self._assigned[key] = assignments(self._formulas.values, key, ())
        return self._assigned[key]

    def _path(
        self, number: int, arms: Sequence[str], times: Mapping[str, str], before: Sequence[str],
        own: Mapping[str, _Noted], others: Mapping[str, _Noted], costs: dict[frozenset[str], str],
    ) -> list[str]:  # fmt: skip
        """Lines for the arms of one path, where it is allowed: their times, the notes of its `own`
        questions, and in `costs` what `others` ask of it."""
        timed = [arm for arm in arms if arm in times]
        lines = [one for one in self._values(times[arm] for arm in timed) if one not in before]
        allowed = self._may[f"path {number}"]
        for arm in timed:
            may = self._may[arm]
            instead = "" if may == allowed else f" if {may} else inf"
            lines.append(f"t_{self._numbers[arm]} = {times[arm]}{instead}")
        minima = _Minima(lines, {frozenset([arm]): f"t_{self._numbers[arm]}" for arm in timed})
        outside: list[str] = []
        for one in others.values():
            for choice in one.timed:
                some = [a for a in one.question.choices[choice] if a in timed]
                if some:
                    cost = minima.least([frozenset([arm]) for arm in some])
                    costs[frozenset(some)] = cost
                    outside.append(cost)
        nothing = [f"{' = '.join(dict.fromkeys(outside))} = inf"] if outside else []
        for name, one in own.items():
            lines.append(f"{name} = {self._note(one, times, minima)}")
            nothing.append(f"{name} = {self._note(one, times, None)}")
        if allowed == "True" or not lines:
            return lines
        return [f"if {allowed}:", *_indented(lines), "else:", *_indented(nothing)]

    # --- notes

    def _noted(self, question: Question, times: Mapping[str, str]) -> _Noted:
        here = {one.name for one in self._policy.candidates}
        known = {c: arms for c, arms in question.choices.items() if not here.isdisjoint(arms)}
        able = _choices(known, self._numbers)
        timed = _choices(able, times)
        return _Noted(
            question,
            tuple(timed),
            () if timed == able else tuple(able),
            tuple(name for name, some in timed.items() if some != able[name]),
            tuple(known),
            self._baseline.choice(question, self._policy.setting),
        )

    def _arms_of(self, noted: _Noted) -> set[str]:
        """The arms that a question's choices have here."""
        choices = _choices(noted.question.choices, self._numbers)
        return {arm for arms in choices.values() for arm in arms}

    def _note(self, noted: _Noted, times: Mapping[str, str], minima: _Minima | None) -> str:
        """The formula of a question's note; without `minima` where every arm is forbidden."""
        able = _choices(noted.question.choices, self._numbers)
        if minima is None:
            return "-1"
        may = [" or ".join(self._may[arm] for arm in able[choice]) for choice in noted.allowed]
        arms = _choices(able, times)
        partly = [noted.timed.index(choice) for choice in noted.partly]
        return minima.note([arms[choice] for choice in noted.timed], may, partly)


class _Minima:
    """Least times, each computed once."""

    def __init__(self, lines: list[str], known: Mapping[frozenset[str], str]) -> None:
        """`known` has the variables of sets of arms."""
        self._lines = lines
        self._known = dict(known)

    def note(
        self, choices: Sequence[Sequence[str]], may: Sequence[str], partly: Sequence[int]
    ) -> str:
        """The formula of a note, as `_Noted` says, of choices with these arms."""
        costs = [self._cost(arms) for arms in choices]
        may = [*may, *(f"{costs[i]} < inf" for i in partly)]
        if len(costs) < 2:
            return _tuple([*(f"{cost} < inf" for cost in costs), *may])
        best = self.least([frozenset(arms) for arms in choices])
        most = f"most_{best.partition('_')[2]}"
        self._lines.append(f"{most} = {best} * {1 + MARGIN!r}")
        # One that has to be compared with choices without a time needs another that has one.
        end = " < inf" if may else ""
        ahead = [
            " and ".join(f"{most} < {other}{end}" for j, other in enumerate(costs) if j != i)
            for i in range(len(costs))
        ]
        flags = _tuple([*(f"{cost} <= {most} < inf" for cost in costs), *may])
        return "".join(f"{i} if {test} else " for i, test in enumerate(ahead)) + flags

    def _cost(self, arms: Sequence[str]) -> str:
        """The variable that holds the least time of `arms`, made of the largest sets known."""
        wanted, covered, parts = frozenset(arms), frozenset[str](), []
        for one in sorted(self._known, key=len, reverse=True):
            if one <= wanted and not one <= covered:
                parts.append(one)
                covered |= one
        return self.least(parts)

    def least(self, sets: Sequence[frozenset[str]]) -> str:
        """The variable that holds the least time of the arms in `sets`, each of which has one."""
        every = sets[0]
        for one in sets[1:]:
            both = every | one
            if both not in self._known:
                a, b = self._known[every], self._known[one]
                name = f"best_{'_'.join([*a.split('_')[1:], *b.split('_')[1:]])}"
                self._lines.append(f"{name} = {a} if {a} < {b} else {b}")
                self._known[both] = name
            every = both
        return self._known[every]


def _choices(
    choices: Mapping[str, Sequence[str]], arms: Mapping[str, object]
) -> dict[str, list[str]]:
    """Choices with those of their arms that are among `arms`; none without."""
    found = {name: [arm for arm in some if arm in arms] for name, some in choices.items()}
    return {name: some for name, some in found.items() if some}


def _tuple(formulas: Sequence[str]) -> str:
    return f"({''.join(f'{one}, ' for one in formulas)})"


def _common(limits: Iterable[Sequence[str]]) -> list[str]:
    """What stands in each."""
    first, *others = [*limits] or [()]
    return [one for one in first if all(one in some for some in others)]


_BOUND = re.compile(r"(\w+) > (\d+)")


def _none_of(conditions: Sequence[str]) -> str:
    """The formula that no condition holds; of several bounds of one number the least counts."""
    bounds: dict[str, int] = {}
    others = []
    for one in conditions:
        if found := _BOUND.fullmatch(one):
            name, most = found[1], int(found[2])
            bounds[name] = min(bounds.get(name, most), most)
        else:
            others.append(f"not ({one})")
    return (
        " and ".join([*(f"{name} <= {most}" for name, most in bounds.items()), *others]) or "True"
    )


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _is_wrong(one: Candidate) -> bool:
    return one.failures is not None and one.failures.wrong is not None
