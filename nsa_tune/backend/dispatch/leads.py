"""Which arm is faster for certain, told from a batch's sums without the arms' whole models.

Of two arms' times only the difference matters, and that is one linear form: terms that both share
fall together or out, and a term that is dear to compute may be replaced by a bound of it. Where
such a form is positive the slower arm cannot change an answer; elsewhere everything is compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

from nsa_tune.backend.dispatch.decide import MARGIN
from nsa_tune.backend.dispatch.polynomials import (
    Polynomial,
    added,
    is_positive,
    polynomial_of,
    scaled,
)
from nsa_tune.backend.dispatch.tracing import Expression, Leaf, Tree
from nsa_tune.backend.types.batch import Batch, Mode

__all__ = [
    "Bounds",
    "Contest",
    "Form",
    "Lead",
    "Standing",
    "bounds_of",
    "form_of",
    "holding",
    "leads",
    "typical",
]

_WORTH = 0.25
"""Part of the typical batches, of those that are left, on which a lead must hold: elsewhere asking
is lost time."""
_FIXED = 2
"""What asking costs besides its products, in these."""
_SURE = 1 + 1e-6
"""Ahead by this much in exact arithmetic is ahead in floating point, in whatever order terms are
added and multiplied: each rounding is below 2e-16 of what is rounded."""


class Form(NamedTuple):
    """A time as a constant and a multiple of each of several amounts."""

    constant: float
    parts: Mapping[int, tuple[float, Expression]]
    """By the amount's number."""


Bounds: TypeAlias = Mapping[int, tuple[Polynomial, Polynomial]]
"""The least and the most of some amounts, by number."""

Standing: TypeAlias = Mapping[str, str]
"""Arms, and as code the condition under which each is forbidden; "" if never."""


class Contest(NamedTuple):
    """A question that the arms answer."""

    choices: Mapping[str, Sequence[str]]
    rule: Tree[str]
    """What the engine's rule takes."""

    @property
    def overlaps(self) -> bool:
        """Whether an arm realises several choices."""
        arms = [arm for some in self.choices.values() for arm in some]
        return len({*arms}) < len(arms)

    def choice_of(self, arm: str) -> str | None:
        """The choice that `arm` realises, if any."""
        return next((choice for choice, arms in self.choices.items() if arm in arms), None)

    def opposes(self, one: str, other: str) -> bool:
        """Whether the two arms realise two choices."""
        choices = {self.choice_of(one), self.choice_of(other)}
        return None not in choices and len(choices) == 2

    def is_open(self, arms: Collection[str]) -> bool:
        """Whether `arms` leave more than one choice."""
        return sum(any(arm in arms for arm in some) for some in self.choices.values()) > 1


class Lead(NamedTuple):
    """An arm that is certainly ahead of all that it is compared with, where a condition holds."""

    winner: str
    losers: tuple[str, ...]
    text: str
    """The condition as code, which says too that the winner may run; "" where it always holds."""

    def standing(self, arms: Standing) -> Standing:
        """`arms` where the condition holds."""
        left = {name: limits for name, limits in arms.items() if name not in self.losers}
        return {**left, self.winner: ""}


def form_of(weights: Sequence[float], terms: Sequence[object]) -> Form:
    """The model with these weights, of terms and the constant, with factors of terms drawn out."""
    constant, parts = weights[-1], dict[int, tuple[float, Expression]]()
    for weight, term in zip(weights, terms, strict=False):
        if weight:
            factor, amount = _factored(term)
            if amount is None:
                constant += weight * factor
            else:
                before, _ = parts.get(amount.number, (0.0, amount))
                parts[amount.number] = (before + weight * factor, amount)
    return Form(constant, parts)


def _factored(term: object) -> tuple[float, Expression | None]:
    """`term` as a number and what that multiplies, if anything."""
    factor = 1.0
    while isinstance(term, Expression):
        numbers = [one for one in term.arguments if isinstance(one, int | float)]
        if term.operation != "*" or not numbers:
            return factor, term
        factor *= numbers[0]
        term = next(one for one in term.arguments if isinstance(one, Expression))
    assert isinstance(term, int | float)
    return factor * term, None


def bounds_of(terms: Sequence[object], bounds: Sequence[tuple[object, object] | None]) -> Bounds:
    """What is known of the amounts in `terms`, by the bounds of these."""
    found = {}
    for term, pair in zip(terms, bounds, strict=True):
        factor, amount = _factored(term)
        if pair is not None and amount is not None and factor > 0:
            least, most = map(polynomial_of, pair)
            if least is not None and most is not None:
                found[amount.number] = (scaled(least, 1 / factor), scaled(most, 1 / factor))
    return found


def leads(
    asked: Sequence[Contest],
    forms: Mapping[str, Form],
    bounds: Bounds,
    limits: Mapping[str, bool | str],
    batches: Sequence[Batch],
) -> list[Lead]:
    """The leads that are worth asking for among arms that all have times, best first.

    `limits` has as code when an arm is forbidden or behind a cliff. What a lead is worth is on how
    many of `batches` it holds, for what it costs.
    """
    if any(one.overlaps for one in asked):
        return []
    found = []
    for winner, quotients in product(forms, (False, True)):
        lead = _of(winner, asked, forms, bounds, limits[winner], quotients=quotients)
        if lead is not None:
            holds = holding(lead.text or "True", batches)
            found.append((lead, holds, 1 / (_FIXED + lead.text.count("*"))))
    taken: list[Lead] = []
    left = set(range(len(batches)))
    while found:
        best = max(found, key=lambda one: len(one[1] & left) * one[2])
        if len(best[1] & left) <= _WORTH * len(left):
            break
        taken.append(best[0])
        found.remove(best)
        left -= best[1]
    return taken


def holding(condition: str, batches: Iterable[Batch]) -> set[int]:
    """Which of `batches` a condition holds for, as code of one."""
    code, found = compile(condition, "<condition>", "eval"), set()
    for i, batch in enumerate(batches):
        with suppress(ArithmeticError):
            if eval(code, {"batch": batch}):
                found.add(i)
    return found


def _of(
    winner: str, asked: Sequence[Contest], forms: Mapping[str, Form], bounds: Bounds,
    limits: bool | str, *, quotients: bool,
) -> Lead | None:  # fmt: skip
    """What must hold for `winner` to be ahead; None where that cannot be told."""
    own = [one for one in asked if one.choice_of(winner) is not None]
    losers = [arm for arm in forms if any(one.opposes(winner, arm) for one in own)]
    left = forms.keys() - losers
    # A question that the losers answer and the winner does not would be left without them.
    apart = any(one.choice_of(loser) for one in asked if one not in own for loser in losers)
    if limits is True or not losers or apart or any(one.is_open(left) for one in asked):
        return None
    # Where the rule takes the winner's choice a tie goes to it.
    contested = [one for one in own if one.is_open([*forms])]
    favoured = all(one.rule == Leaf(one.choice_of(winner)) for one in contested)
    least = (1.0 if favoured else 1 + MARGIN) * _SURE
    most = 1 + MARGIN if favoured else 1.0
    conditions: list[str] = []
    for loser in losers:
        difference = _difference(forms[loser], most, forms[winner], least, bounds, quotients)
        condition = difference is not None and is_positive(difference)
        if condition is False:
            return None
        if condition is not True:
            conditions.append(condition)
    conditions += [f"not ({limits})"] if limits else []
    return Lead(winner, tuple(losers), " and ".join(conditions))


def _difference(
    loser: Form, gain: float, winner: Form, loss: float, bounds: Bounds, quotients: bool
) -> Polynomial | None:
    """At most `gain` times the loser's time less `loss` times the winner's; None where an amount
    has no bound."""
    total: Polynomial = {(): gain * loser.constant - loss * winner.constant}
    for number in dict.fromkeys([*loser.parts, *winner.parts]):
        more, amount = loser.parts.get(number) or (0.0, winner.parts[number][1])
        less, _ = winner.parts.get(number, (0.0, amount))
        factor = gain * more - loss * less
        value = polynomial_of(amount, quotients=quotients)
        if value is None:
            if number not in bounds:
                return None
            value = bounds[number][0 if factor > 0 else 1]
        total = added(total, scaled(value, factor))
    return total


@lru_cache(maxsize=64)
def typical(mode: Mode, next_n: int) -> tuple[Batch, ...]:
    """Batches of a kind, from a few tokens to many."""
    news = (1, 16, 128, 1024, 4096) if mode is Mode.EXTEND else (next_n,)
    return tuple(
        Batch.from_totals(
            mode=mode,
            sequences=sequences,
            q_tokens=sequences * new,
            kv_tokens=sequences * (prefix + new),
            max_kv=prefix + new,
        )
        for sequences in (1, 4, 16, 64)
        for new in news
        for prefix in (0, 128, 1024, 4096, 32768)
    )
