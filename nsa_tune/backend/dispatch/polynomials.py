"""Polynomials of a batch's sums, of degree 2 at most, and when they are positive."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from math import ceil, floor, isfinite
from typing import TypeAlias

from nsa_tune.backend.dispatch.tracing import Expression

__all__ = ["Polynomial", "added", "is_positive", "polynomial_of", "scaled"]

Polynomial: TypeAlias = Mapping[tuple[str, ...], float]
"""Coefficients by the code of the sums that they multiply, sorted; () is the constant."""


def polynomial_of(node: object, *, quotients: bool = False) -> Polynomial | None:
    """An expression as a polynomial; None of others.

    With `quotients` a sum that is divided by a number and rounded up stands for itself.
    """
    if not isinstance(node, Expression):
        return {(): float(node)} if isinstance(node, int | float) else None
    operation, arguments = node.operation, node.arguments
    if operation == "input":
        return None if node.is_truth else {(f"batch.{arguments[0]}",): 1.0}
    if operation == "//" and quotients:
        code = _rounded_up(node)
        return None if code is None else {(code,): 1.0}
    if operation not in ("+", "-", "*", "/", "neg"):
        return None
    operands = [polynomial_of(one, quotients=quotients) for one in arguments]
    left, right = operands[0], operands[-1]
    if left is None or right is None:
        return None
    match operation:
        case "neg":
            return scaled(left, -1)
        case "+" | "-":
            return added(left, scaled(right, 1 if operation == "+" else -1))
        case "*":
            return _product(left, right)
    divisor = right.get((), 0.0)
    return scaled(left, 1 / divisor) if divisor and len(right) == 1 else None


def _rounded_up(node: Expression) -> str | None:
    """The code of (sum + number) // number where that is at least 1 on every batch."""
    dividend, divisor = node.arguments
    if not isinstance(dividend, Expression) or dividend.operation != "+":
        return None
    amount, more = dividend.arguments
    if not isinstance(amount, Expression) or amount.operation != "input":
        return None
    if type(more) is not int or type(divisor) is not int or not 0 < divisor <= more + 1:
        return None
    return f"((batch.{amount.arguments[0]} + {more}) // {divisor})"


def _product(left: Polynomial, right: Polynomial) -> Polynomial | None:
    product: dict[tuple[str, ...], float] = defaultdict(float)
    for some, factor in left.items():
        for others, more in right.items():
            product[tuple(sorted(some + others))] += factor * more
    plain = all(len(names) == len({*names}) <= 2 for names in product)
    return product if plain else None


def scaled(polynomial: Polynomial, factor: float) -> Polynomial:
    """`factor` times a polynomial."""
    return {names: factor * one for names, one in polynomial.items()}


def added(one: Polynomial, other: Polynomial) -> Polynomial:
    """The sum of two."""
    return {names: one.get(names, 0.0) + other.get(names, 0.0) for names in {**one, **other}}


def is_positive(polynomial: Polynomial) -> bool | str:
    """Whether it is, for all batches or for none, or else the condition of that as code."""
    factors = {names: factor for names, factor in polynomial.items() if names and factor}
    constant = polynomial.get((), 0.0)
    # Every sum is at least 1.
    least = constant + sum(factors.values())
    if least > 0 and all(factor > 0 for factor in factors.values()):
        return True
    if least <= 0 and all(factor < 0 for factor in factors.values()):
        return False
    ((names, factor), *others) = factors.items()
    bound = -constant / factor
    # A factor next to nothing has a bound past all numbers.
    if not others and len(names) == 1 and isfinite(bound):
        return f"{names[0]} " + (f">= {floor(bound) + 1}" if factor > 0 else f"< {ceil(bound)}")
    return f"{_written(factors)} > {-constant!r}"


def _written(factors: Polynomial) -> str:
    """The code of a polynomial without a constant; a sum in several products multiplies once."""
    counts = Counter(name for names in factors for name in names)
    parts, rest = [], dict(factors)
    for name, _ in counts.most_common():
        own = {names: rest.pop(names) for names in list(rest) if name in names}
        inner = [
            " * ".join([repr(factor), *(one for one in names if one != name)])
            for names, factor in own.items()
        ]
        if len(inner) > 1:
            parts.append(f"({' + '.join(inner)}) * {name}")
        elif inner:
            parts.append(f"{inner[0]} * {name}")
    return " + ".join(parts)
