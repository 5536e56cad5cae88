"""A table's decisions as one function of a batch.

The function computes each arm's time from the formulas that its point declares and the weights
that were fitted: `inf` where a limit forbids the arm. For each question it makes a note: the number
of the choice that is faster than all others by more than the margin, or None where every choice is
forbidden. Anything else is noted as flags, of which `decide.settle` says once what they come to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
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
)

if TYPE_CHECKING:
    from nsa_tune.backend.baselines import Baseline
    from nsa_tune.backend.costmodel.policy import Candidate, Policy
    from nsa_tune.backend.types.batch import Batch
    from nsa_tune.backend.types.point import Question

_Models: TypeAlias = dict[int | None, Mapping[str, "_Model"]]
"""By regime, those of the arms that were measured there; None is any other."""
Note: TypeAlias = int | tuple[Any, ...] | None
Key: TypeAlias = tuple[Any, ...]
"""A note for each question, and what the caller appends."""

_CAUGHT = (ArithmeticError, KeyError, ValueError)
_WORSE = 1 + MARGIN
_CERTAINLY = 1e-9
"""By how much, relatively, sums of the same terms may differ through rounding, and much more."""


class Decisions:
    """The code that answers the questions of some points, and what its keys mean."""

    def __init__(self, points: Sequence[PointCode]) -> None:
        self._points = points
        self._fixed = {name: note for point in points for name, note in point.fixed.items()}
        self._open = [note for point in points for note in point.notes if note not in self._fixed]

    def function(
        self, head: Sequence[str], facts: Sequence[str], make: Callable[[Key], object],
        tail: Sequence[str], names: Mapping[str, Any], fields: Mapping[str, str],
        attributes: Sequence[str] = (),
    ) -> Callable[[Batch], Any]:  # fmt: skip
        """The function that begins with `head`, computes a key and ends with `tail`.

        The formulas `facts` end the key. What `make` makes of a key, once, is `found` in `tail`. A
        batch without a query, or in a regime where surfaces decide, is for `slow`, which is one of
        `names`. `fields` of all batches are known, and `attributes` are what `tail` sets.
        """
        own = [line for point in self._points for line in point.lines]
        # What is the same for all batches takes no time.
        own = [line for line in own if line.partition(" = ")[0] not in self._fixed] or ["pass"]
        lines = [f"if {NO_ROWS}:", "    return slow(batch)", "try:", *_indented(own)]
        # As asking everything: what a point cannot compute leaves it to the baseline.
        lines += ["except (ArithmeticError, ValueError):", "    return slow(batch)"]
        parts = [*self._open, *facts]
        lines += [
            f"key = ({''.join(f'{part}, ' for part in parts)})",
            "try:",
            "    found = held[key]",
            "except KeyError:",
            "    found = held[key] = make(key)",
            *tail,
        ]
        body = [*head, *fields_of(lines, fields), *lines]
        source = "\n".join(["def planned(batch):", *_indented(body), ""])
        names = {**self._functions(), "held": {}, "make": make, **names}
        function: Callable[[Batch], Any] = defined(source, "planned", names, attributes)
        return function

    def _functions(self) -> dict[str, Any]:
        found: dict[str, Any] = {one.__name__: one for one in _CAUGHT}
        for point in self._points:
            for name, function in point.functions.items():
                if found.setdefault(name, function) is not function:
                    raise ValueError(f"two points mean different functions by {name}")
        return found

    def choices(self, key: Key) -> dict[str, str | None]:
        """The choice for each question."""
        notes = self._fixed | dict(zip(self._open, key, strict=False))
        return {
            question.name: point.choice(question, notes[name])
            for point in self._points
            for name, question in point.notes.items()
        }


class _Model(NamedTuple):
    """One arm's latency model in one regime."""

    weights: tuple[float, ...]
    terms: list[tuple[str, float]]
    """Features with their weights, those that have one."""


class _Meaning(NamedTuple):
    """What the flags of one question mean in one regime.

    They are: for each of `timed` whether it is within the margin of the best, for each of `allowed`
    whether it is allowed, and for each of `partly` whether an arm with a time is.
    """

    question: Question
    arms: Mapping[str, Sequence[str]]
    """By choice, those of its arms that may run here somewhere."""
    timed: tuple[str, ...]
    """Choices with a time."""
    allowed: tuple[str, ...]
    """Choices that are asked for; empty where all have times."""
    partly: tuple[str, ...]
    """Choices that have arms without a time too."""
    known: tuple[str, ...]
    """Choices that this device has an arm for."""
    baseline: str | Switch

    @property
    def has_untimed(self) -> bool:
        """Whether choices or arms without a time must be considered."""
        return bool(self.allowed or self.partly)

    @property
    def switch(self) -> str:
        """The formula of the condition on which the baseline's choice depends."""
        return self.baseline.condition if isinstance(self.baseline, Switch) else "False"

    def note(self, tests: Mapping[str, str], rest: str) -> str:
        """The formula of the number of the choice whose test holds first, or else of `rest`."""
        text = ""
        for name, test in tests.items():
            number = [*self.question.choices].index(name)
            if test == "True":
                return f"{text}{number}"
            text += f"{number} if {test} else "
        return text + rest

    def tie(self, names: Container[str]) -> str:
        """The formula of the number of the choice that is taken if these tie."""
        near = [name in names for name in self.timed]
        yes, no = self.choice(near, True) or "", self.choice(near, False) or ""
        return self.note({no: "True"} if yes == no else {yes: self.switch, no: "True"}, "")

    def choice(self, flags: Sequence[bool], switched: bool) -> str | None:
        """What is taken; `switched` is the condition of the baseline's switch."""
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


class PointCode:
    """The code of one point: lines that make the notes of its questions."""

    def __init__(
        self, policy: Policy, baseline: Baseline, questions: Iterable[Question] | None = None
    ) -> None:
        """`questions` are all by default."""
        asked_for = policy.point.questions if questions is None else questions
        self.notes = {f"note_{one.name}": one for one in asked_for}
        self._policy = policy
        self._meanings: list[_Meaning] = []
        self._assigned: dict[frozenset[str], list[str]] = {}
        self._formulas = policy.features.formulas
        self.functions = self._formulas.functions
        notes = self.notes
        asked = {arm for one in notes.values() for arms in one.choices.values() for arm in arms}
        arms = [one for one in policy.candidates if one.name in asked and not _is_wrong(one)]
        self._arms = {one.name: one for one in arms}
        self._times = {one.name: f"t_{i}" for i, one in enumerate(arms)}
        here = {one.name for one in policy.candidates}
        self._known = {name: tuple(_choices(one.choices, here)) for name, one in notes.items()}
        self._able = {name: _choices(one.choices, self._arms) for name, one in notes.items()}
        self._defaults = {n: baseline.choice(one, policy.setting) for n, one in notes.items()}
        self._groups = _groups(self._arms)
        self._own: dict[str, str] = {}
        """By arm, the formula that its own limits allow it, those that its group does not share."""
        self._allowed: dict[str, str] = {}
        """The same with those that its group shares."""
        self._limits = {one.name: self._limits_of(one) for one in arms}
        self._paths = [self._path(*one) for one in enumerate(self._groups)]
        self.lines = self._written()
        found = (_NUMBERED.fullmatch(line) for line in self.lines)
        self.fixed: dict[str, Note] = {one[1]: int(one[2]) for one in found if one}
        """Notes that are the same number for every batch."""

    def choice(self, question: Question, note: Note) -> str | None:
        """What a note about the question means."""
        if note is None:
            return None
        if isinstance(note, tuple):
            number, switched, *flags = note
            return self._meanings[number].choice(flags, switched)
        return [*question.choices][note]

    def _limits_of(self, one: Candidate) -> list[str]:
        """What forbids the arm: its limits, and where it failed when it was measured."""
        found = [limit.passed for limit in one.limits if limit.passed != NO_ROWS]
        if one.failures is not None:
            alike = self._policy.point.regimes_alike
            for kin, boxes in one.failures.boxes.items():
                found += [f"regime // {alike} == {kin} and {box.formula}" for box in boxes]
        return _least_bounds(found)

    def _path(self, number: int, group: Sequence[str]) -> str:
        """The formula of the limits that a group of arms shares."""
        shared = _shared([self._limits[arm] for arm in group])
        for arm in group:
            own = _none_of([one for one in self._limits[arm] if one not in shared])
            self._own[arm] = own
            parts = ([f"path_{number}"] if shared else []) + ([own] if own != "True" else [])
            self._allowed[arm] = " and ".join(parts) or "True"
        return _none_of(shared)

    # --- regimes

    def _written(self) -> list[str]:
        formulas, by_surfaces = self._formulas, self._policy.fitted.by_surfaces
        models = (one.models for one in self._policy.candidates)
        measured = sorted({regime for some in models for regime in some} - by_surfaces)
        every = frozenset({0}) if formulas.regime == "0" else formulas.regimes
        covered = every is not None and bool(measured) and every <= {*measured, *by_surfaces}
        alike = self._alike([*measured] if covered else [*measured, None])
        lines = []
        for one in sorted(by_surfaces):
            lines += [f"if regime == {one}:", "    return slow(batch)"]
        lines += _one_of({_is_any(some): self._block(asked, some) for asked, some in alike})
        for i, path in enumerate(self._paths):
            if path != "True":
                lines = _with_value(f"path_{i}", path, lines)
        if any("regime" in line for line in lines):
            values = assignments(formulas.values, [formulas.regime], ())
            lines = [*values, f"regime = {formulas.regime}", *lines]
        return lines

    def _alike(self, regimes: Iterable[int | None]) -> list[tuple[list[_Asked], _Models]]:
        """What is asked, and the models by regime, of regimes in which the same is asked."""
        alike: list[tuple[list[_Asked], _Models]] = []
        for regime in regimes:
            models = {
                name: self._model(one.models[regime].weights)
                for name, one in self._arms.items()
                if regime is not None and regime in one.models
            }
            asked = [self._asked(name, one, models) for name, one in self.notes.items()]
            same = next((some for others, some in alike if others == asked), None)
            if same is None:
                alike.append((asked, {regime: models}))
            else:
                same[regime] = models
        # Any other regime comes last, as what is none of those before.
        return sorted(alike, key=lambda one: None in one[1])

    def _model(self, weights: tuple[float, ...]) -> _Model:
        pairs = zip(self._formulas.features, weights, strict=False)
        return _Model(weights, [pair for pair in pairs if pair[1]])

    def _block(self, left: list[_Asked], models: _Models) -> list[str]:
        """Lines that make the notes for batches of regimes in which the same arms are compared."""
        compared = {arm for one in left for arm in one.arms}
        needed = [[arm for arm in group if arm in compared] for group in self._groups]
        before = self._needed_twice(needed, models)
        lines = [*before]
        costs: dict[frozenset[str], str] = {}
        for number, group in enumerate(self._groups):
            own = [one for one in left if one.every and one.every <= {*group}]
            left = [one for one in left if one not in own]
            inner = self._timed(needed[number], models, before)
            minima = _Minima(inner, {frozenset([arm]): self._times[arm] for arm in needed[number]})
            outside = {}
            for one in left:
                for arms in one.contenders.values() if one.arms else ():
                    if some := [arm for arm in arms if arm in needed[number]]:
                        outside[frozenset(some)] = minima.cost(some)
            costs |= outside
            inner += [f"{one.note} = {self._noted(one, minima, self._own)}" for one in own]
            if self._paths[number] != "True" and inner:
                instead = [f"{one.note} = None" for one in own]
                instead += [f"{name} = inf" for name in dict.fromkeys(outside.values())]
                inner = [f"if path_{number}:", *_indented(inner), "else:", *_indented(instead)]
            lines += inner
        minima = _Minima(lines, costs)
        for one in left:
            lines.append(f"{one.note} = {self._noted(one, minima, self._allowed)}")
        return lines

    # --- times

    def _needed_twice(self, groups: Sequence[Sequence[str]], models: _Models) -> list[str]:
        """The lines that assign what the times of arms of several groups need."""
        if len(groups) < 2:
            return []
        own = [self._values(arms, models.values()) for arms in groups]
        every = self._values([arm for arms in groups for arm in arms], models.values())
        return [line for line in every if sum(line in some for some in own) > 1]

    def _values(self, arms: Sequence[str], models: Iterable[Mapping[str, _Model]]) -> list[str]:
        """The lines that assign what the times of `arms` need."""
        used = frozenset([name for own in models for arm in arms for name, _ in own[arm].terms])
        if used not in self._assigned:
            self._assigned[used] = assignments(self._formulas.values, used, ())
        return self._assigned[used]

    def _timed(self, arms: Sequence[str], models: _Models, before: Sequence[str]) -> list[str]:
        """Lines that assign the times of `arms`; the values `before` are there."""
        if not arms:
            return []
        values = [
            [line for line in self._values(arms, [own]) if line not in before]
            for own in models.values()
        ]
        shared = _shared(values)
        blocks = {
            _is_any([regime]): [
                *(line for line in needed if line not in shared),
                *(f"{self._times[arm]} = {self._time(arm, own[arm])}" for arm in arms),
            ]
            for needed, (regime, own) in zip(values, models.items(), strict=True)
        }
        return [*shared, *_one_of(blocks)]

    def _time(self, arm: str, model: _Model) -> str:
        """The formula of the arm's time."""
        own, surcharge = self._own[arm], self._arms[arm].surcharge
        terms = [repr(model.weights[-1])]
        terms += [f"{weight!r} * {name}" for name, weight in model.terms]
        terms += [f"({surcharge})"] if surcharge else []
        return " + ".join(terms) + (f" if {own} else inf" if own != "True" else "")

    # --- notes

    def _asked(self, note: str, question: Question, models: Mapping[str, _Model]) -> _Asked:
        able = self._able[note]
        timed = _choices(able, models)
        meaning = _Meaning(
            question,
            able,
            tuple(timed),
            () if timed == able else tuple(able),
            tuple(name for name, some in timed.items() if some != able[name]),
            self._known[note],
            self._defaults[note],
        )
        contenders = self._contenders(meaning, timed, models)
        # One choice that is ahead wherever it may run needs no time.
        is_open = len(contenders) > 1 or meaning.has_untimed
        return _Asked(
            note, meaning, contenders, _every_arm(able), _every_arm(contenders if is_open else {})
        )

    def _contenders(
        self, meaning: _Meaning, timed: Mapping[str, list[str]],
        models: Mapping[str, _Model],
    ) -> Mapping[str, list[str]]:  # fmt: skip
        """`timed` without the arms that another one is always ahead of, wherever they may run."""
        if meaning.has_untimed:
            return timed
        arms = _every_arm(timed)
        beaten = {arm for arm in arms if any(self._beats(one, arm, models) for one in arms)}
        return _choices(timed, arms - beaten)

    def _beats(self, one: str, other: str, models: Mapping[str, _Model]) -> bool:
        """Whether `one` may run wherever `other` may, and is faster by more than the margin there:
        features are never negative."""
        return (
            {*self._limits[one]} <= {*self._limits[other]}
            and not self._arms[one].surcharge
            and all(
                a * _WORSE * (1 + _CERTAINLY) <= b
                for a, b in zip(models[one].weights, models[other].weights, strict=True)
            )
        )

    def _noted(self, one: _Asked, minima: _Minima, may: Mapping[str, str]) -> str:
        """The formula of a question's note; `may` has for each arm that of its being allowed."""
        meaning, contenders = one.meaning, one.contenders
        allowed = {name: _any_of([may[arm] for arm in arms]) for name, arms in meaning.arms.items()}
        if not one.arms and contenders:
            return meaning.note({name: allowed[name] for name in contenders}, "None")
        ahead, near = minima.compared(contenders, _closed(meaning, allowed))
        if len(ahead) == 2 and not meaning.has_untimed:
            some = minima.cost(next(iter(contenders.values())))
            return meaning.note(ahead, f"({meaning.tie(contenders)}) if {some} < inf else None")
        if not contenders:
            # Without any time the baseline's choice is taken where it is allowed.
            ahead = {name: test for name, test in allowed.items() if name == meaning.baseline}
        flags = [meaning.switch, *(near.get(name, "False") for name in meaning.timed)]
        flags += [allowed[name] for name in meaning.allowed]
        flags += [f"{minima.cost(contenders[name])} < inf" for name in meaning.partly]
        if meaning not in self._meanings:
            self._meanings.append(meaning)
        return meaning.note(ahead, f"({self._meanings.index(meaning)}, {', '.join(flags)})")


def _closed(meaning: _Meaning, allowed: Mapping[str, str]) -> Mapping[str, str] | None:
    """By choice, the formula that it is forbidden where that is a name's; None where every arm has
    a time. Where a choice has no time at all, another one's being forbidden decides nothing."""
    if not meaning.has_untimed:
        return None
    if len(meaning.timed) < len(meaning.arms):
        return {}
    return {name: f"not {test}" for name, test in allowed.items() if test.isidentifier()}


class _Asked(NamedTuple):
    """A question in one regime."""

    note: str
    """The variable of its note."""
    meaning: _Meaning
    contenders: Mapping[str, Sequence[str]]
    """By choice, the arms whose times are compared."""

    every: frozenset[str]
    """The arms that can run."""
    arms: frozenset[str]
    """Those whose times must be known."""


class _Minima:
    """Least times, each computed once."""

    def __init__(self, lines: list[str], known: Mapping[frozenset[str], str]) -> None:
        """`known` has the variables of sets of arms."""
        self._lines = lines
        self._known = dict(known)

    def compared(
        self, choices: Mapping[str, Sequence[str]], closed: Mapping[str, str] | None
    ) -> tuple[dict[str, str], dict[str, str]]:
        """By choice, the formulas that it is ahead of all others by more than the margin, and that
        it is within the margin of the best where none is ahead. `closed` is None where all arms
        have times. Otherwise a choice must be ahead of one that has a time, or of the only other
        one, if that is `closed`: forbidden.
        """
        costs = {name: self.cost(arms) for name, arms in choices.items()}
        if len(costs) < 3:
            least = {name: f"{cost} * {_WORSE!r}" for name, cost in costs.items()}
            # Of two with a time both are, where none is ahead.
            near = {name: f"{cost} < inf" for name, cost in costs.items()}
        else:
            best = self.least([frozenset(arms) for arms in choices.values()])
            most = f"most_{best.partition('_')[2]}"
            self._lines.append(f"{most} = {best} * {_WORSE!r}")
            least = dict.fromkeys(costs, most)
            near = {name: f"{cost} <= {most} < inf" for name, cost in costs.items()}
        ahead = {}
        for name in costs if len(costs) > 1 else ():
            other, *rest = (one for one in costs if one != name)
            tests = [f"{least[name]} < {costs[one]}" for one in (other, *rest)]
            if closed and other in closed and not rest:
                tests.append(f"({costs[other]} < inf or {closed[other]})")
            elif closed is not None:
                tests[0] += " < inf"
            ahead[name] = " and ".join(tests)
        return ahead, near

    def cost(self, arms: Iterable[str]) -> str:
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


# --- formulas

_BOUND = re.compile(r"(\w+) > (\d+)")
_NUMBERED = re.compile(r"(note_\w+) = (\d+)")


def _with_value(name: str, formula: str, lines: list[str]) -> list[str]:
    """`lines` with the value of `name`: in its place if it is used once, else assigned before."""
    uses = [i for i, line in enumerate(lines) if name in line]
    if len(uses) > 1:
        return [f"{name} = {formula}", *lines]
    return [
        line.replace(name, f"({formula})") if i in uses else line for i, line in enumerate(lines)
    ]


def _least_bounds(conditions: Iterable[str]) -> list[str]:
    """The same conditions, of several bounds of one number the least alone."""
    bounds: dict[str, int] = {}
    others: dict[str, None] = {}
    for one in conditions:
        if found := _BOUND.fullmatch(one):
            name, most = found[1], int(found[2])
            bounds[name] = min(bounds.get(name, most), most)
        else:
            others[one] = None
    return [*(f"{name} > {most}" for name, most in bounds.items()), *others]


def _none_of(conditions: Iterable[str]) -> str:
    """The formula that no condition holds."""
    found = [
        one.replace(">", "<=") if _BOUND.fullmatch(one) else f"not ({one})" for one in conditions
    ]
    return " and ".join(found) or "True"


def _any_of(conditions: Iterable[str]) -> str:
    """The formula that some condition holds; "x and y" says nothing beside "x"."""
    found = dict.fromkeys(conditions)
    if "True" in found:
        return "True"
    kept = [one for one in found if " and " not in one or one.partition(" and ")[0] not in found]
    return " or ".join(kept)


def _shared(lists: Sequence[Sequence[str]]) -> list[str]:
    """What stands in each list."""
    return [one for one in lists[0] if all(one in some for some in lists)]


def _is_any(regimes: Iterable[int | None]) -> str:
    """The formula that a batch is in one of these regimes."""
    return " or ".join(f"regime == {one}" for one in regimes)


def _one_of(blocks: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines of each block where its test holds; that of the last is not asked."""
    if len(blocks) == 1:
        return [*next(iter(blocks.values()))]
    tests = [f"elif {test}:" for test in blocks]
    tests[0], tests[-1] = tests[0][2:], "else:"
    pairs = zip(tests, blocks.values(), strict=True)
    return [line for test, lines in pairs for line in (test, *_indented(lines))]


# --- arms


def _groups(arms: Iterable[str]) -> list[list[str]]:
    """Arms whose limits are asked together: those of a path, or all where no path has several."""
    paths: dict[str, list[str]] = {}
    for arm in arms:
        paths.setdefault(arm.rpartition("/")[0], []).append(arm)
    if len(paths) < sum(map(len, paths.values())):
        return [*paths.values()]
    return [[arm for some in paths.values() for arm in some]] if paths else []


def _choices(choices: Mapping[str, Sequence[str]], arms: Container[str]) -> dict[str, list[str]]:
    """Choices with those of their arms that are among `arms`; none without."""
    found = {}
    for name, some in choices.items():
        if own := [arm for arm in some if arm in arms]:
            found[name] = own
    return found


def _every_arm(choices: Mapping[str, Iterable[str]]) -> frozenset[str]:
    return frozenset([arm for arms in choices.values() for arm in arms])


def _is_wrong(one: Candidate) -> bool:
    return one.failures is not None and one.failures.wrong is not None


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]
