"""What a point's functions compute, as expressions: found by running them on symbols.

Guards, cost terms and engine rules are plain Python over a batch. Run on a `SymbolicBatch`, their
arithmetic records itself; where they branch they are run again, once a way, which makes a tree
of conditions with what they return at its leaves. A function that does more with a number than
arithmetic and comparison (a logarithm, say) cannot be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeAlias, TypeVar

from nsa_tune.backend.types.batch import Mode

__all__ = [
    "Expression",
    "Fork",
    "Leaf",
    "SymbolicBatch",
    "Trace",
    "Tree",
    "Untraceable",
    "values",
]

_MOST_RUNS = 128

T = TypeVar("T")


class Untraceable(Exception):
    """A function cannot be followed on symbols."""


class Expression:
    """A number or a truth that depends on the batch. Equal ones of a trace are one object."""

    __slots__ = ("arguments", "number", "operation", "trace")

    def __init__(
        self, trace: Trace, number: int, operation: str, arguments: tuple[object, ...]
    ) -> None:
        self.trace = trace
        self.number = number
        self.operation = operation
        """An operator, "neg", "input" (a field of the batch) or "local" (a variable)."""
        self.arguments = arguments
        """Expressions and plain numbers; of an input or variable its name."""

    @property
    def is_truth(self) -> bool:
        """Whether it is true or false, and not a number."""
        if self.operation == "input":
            return self.arguments[0] == "captured"
        return self.operation in _TRUTHS

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole number on every batch."""
        if self.operation == "input":
            return self.arguments[0] != "captured"
        return self.operation in ("+", "-", "*", "//", "%", "neg") and all(
            one.is_whole if isinstance(one, Expression) else type(one) is int
            for one in self.arguments
        )

    def __add__(self, other: object) -> Expression:
        return self.trace.node("+", self, other)

    def __radd__(self, other: object) -> Expression:
        return self.trace.node("+", other, self)

    def __sub__(self, other: object) -> Expression:
        return self.trace.node("-", self, other)

    def __rsub__(self, other: object) -> Expression:
        return self.trace.node("-", other, self)

    def __mul__(self, other: object) -> Expression:
        return self.trace.node("*", self, other)

    def __rmul__(self, other: object) -> Expression:
        return self.trace.node("*", other, self)

    def __truediv__(self, other: object) -> Expression | float:
        if self.operation == "*" and self.is_whole and other is self.arguments[0]:
            factor = self.arguments[1]
            # Exact, and a sum that could be 0 here is none.
            if type(factor) is int and _name(other) in _AT_LEAST_ONE:
                return float(factor)
        return self.trace.node("/", self, other)

    def __rtruediv__(self, other: object) -> Expression:
        return self.trace.node("/", other, self)

    def __floordiv__(self, other: object) -> Expression:
        return self.trace.node("//", self, other)

    def __rfloordiv__(self, other: object) -> Expression:
        return self.trace.node("//", other, self)

    def __mod__(self, other: object) -> Expression:
        return self.trace.node("%", self, other)

    def __rmod__(self, other: object) -> Expression:
        return self.trace.node("%", other, self)

    def __neg__(self) -> Expression:
        return self.trace.node("neg", self)

    def __lt__(self, other: object) -> Expression:
        return self.trace.node("<", self, other)

    def __gt__(self, other: object) -> Expression:
        return self.trace.node("<", other, self)

    def __le__(self, other: object) -> Expression:
        return self.trace.node("<=", self, other)

    def __ge__(self, other: object) -> Expression:
        return self.trace.node("<=", other, self)

    def __eq__(self, other: object) -> Expression:  # type: ignore[override]
        return self.trace.node("==", self, other)

    def __ne__(self, other: object) -> Expression:  # type: ignore[override]
        return self.trace.node("!=", self, other)

    # A set or a dictionary would go by identity, where numbers go by value.
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self.trace.decide(self if self.is_truth else self.trace.node("!=", self, 0))

    def __int__(self) -> int:
        if not self.is_truth:
            raise Untraceable("a conversion of a number")
        return int(bool(self))

    def __float__(self) -> float:
        raise Untraceable("a function of the math module")

    def __index__(self) -> int:
        raise Untraceable("a number used as an index")

    def __format__(self, spec: str) -> str:
        # The sentence that a guard returns: that there is one is all that matters.
        return "?"


_TRUTHS = frozenset({"<", "<=", "==", "!="})
_NAMED = frozenset({"input", "local"})
_NEGATIONS = {"==": "!=", "!=": "==", "<": "<=", "<=": "<"}
_AT_LEAST_ONE = ("sequences", "q_tokens", "kv_tokens", "max_kv")
_NEVER_MORE = {("q_tokens", "kv_tokens"), ("sequences", "q_tokens"), ("max_kv", "kv_tokens")}
"""Sums of which the first is at most the second, in any batch."""


def _turned(operation: str, arguments: tuple[object, ...]) -> tuple[object, ...]:
    """The arguments of a comparison's negation."""
    return arguments[::-1] if operation in ("<", "<=") else arguments


def _name(node: object) -> str:
    """Of an input its name."""
    if isinstance(node, Expression) and node.operation == "input":
        return str(node.arguments[0])
    return ""


def _plain(operation: str, left: object, right: object) -> tuple[str, tuple[object, object]]:
    """A comparison with what is added, subtracted and multiplied on one side done on the other.

    Only where all are whole numbers, so that it stays exact.
    """
    while True:
        if isinstance(right, Expression) and type(left) is int:
            undone = _undone(operation, left, right, low=True)
        elif isinstance(left, Expression) and type(right) is int:
            undone = _undone(operation, right, left, low=False)
        else:
            undone = None
        if undone is None:
            break
        bound, node = undone
        left, right = (bound, node) if isinstance(right, Expression) else (node, bound)
    # Equality is the same either way round.
    if operation in ("==", "!=") and _rank(right) < _rank(left):
        left, right = right, left
    return operation, (left, right)


def _rank(node: object) -> float:
    return node.number if isinstance(node, Expression) else inf


def _undone(
    operation: str, bound: int, node: Expression, *, low: bool
) -> tuple[int | Expression, Expression] | None:
    """The outermost step of `node` taken over to `bound`, which lies below or above it."""
    if node.operation not in ("+", "-", "*"):
        return None
    a, b = node.arguments
    if node.operation == "-" and bound == 0 and isinstance(a, Expression):
        # a - b against 0 is a against b, for whole numbers and others alike.
        return (b, a) if isinstance(b, Expression) else None
    if not isinstance(a, Expression):
        a, b = b, a
        if node.operation == "-":
            return None
    if not isinstance(a, Expression) or type(b) is not int or not a.is_whole:
        return None
    if node.operation == "*":
        if b <= 0 or operation in ("==", "!="):
            return None
        # bound <= a * b is ceil(bound / b) <= a; bound < a * b is floor(bound / b) < a.
        up = (operation == "<=") == low
        return (-(-bound // b) if up else bound // b), a
    return (bound - b if node.operation == "+" else bound + b), a


@dataclass(frozen=True, slots=True)
class Leaf(Generic[T]):
    """Where a function returned."""

    value: T


@dataclass(frozen=True, slots=True)
class Fork(Generic[T]):
    """Where a function branched."""

    condition: Expression
    yes: Tree[T]
    no: Tree[T]


Tree: TypeAlias = Leaf[T] | Fork[T]


def values(tree: Tree[T]) -> Iterator[T]:
    """What stands at the leaves of `tree`."""
    if isinstance(tree, Leaf):
        yield tree.value
    else:
        yield from values(tree.yes)
        yield from values(tree.no)


class Trace:
    """The expressions of several functions over one symbolic batch."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[object, ...], Expression] = {}
        self._by_number: list[Expression] = []
        self._decided: list[Expression] = []
        self._forced: tuple[bool, ...] = ()
        self._known: dict[int, bool] = {}
        self._settled: dict[tuple[int, bool], Mapping[int, bool]] = {}

    def node(self, operation: str, *arguments: object) -> Expression:
        """The expression of `operation` on `arguments`."""
        if operation not in _NAMED and not all(
            isinstance(one, Expression) or type(one) in (int, float, bool) for one in arguments
        ):
            raise Untraceable(f"{operation} with something that is no number")
        if operation in _TRUTHS:
            operation, arguments = _plain(operation, *arguments)
        key = (
            operation,
            *((one.number, "") if isinstance(one, Expression) else (one, type(one))
              for one in arguments),
        )  # fmt: skip
        found = self._nodes.get(key)
        if found is None:
            found = Expression(self, len(self._nodes), operation, arguments)
            self._nodes[key] = found
            self._by_number.append(found)
        return found

    def numbered(self, number: int) -> Expression:
        """The expression that has this number."""
        return self._by_number[number]

    def consequences(self, condition: Expression, truth: bool) -> Mapping[int, bool]:
        """The conditions, by number, that are settled when `condition` turns out so."""
        key = (condition.number, truth)
        if key not in self._settled:
            self._settled[key] = dict(self._consequences(condition, truth))
        return self._settled[key]

    def _consequences(self, condition: Expression, truth: bool) -> Iterator[tuple[int, bool]]:
        yield condition.number, truth
        operation, arguments = condition.operation, condition.arguments
        if operation not in _TRUTHS:
            return
        yield self.node(_NEGATIONS[operation], *_turned(operation, arguments)).number, not truth
        left, right = arguments
        if operation == "<" and truth:
            yield self.node("==", left, right).number, False
            yield self.node("!=", left, right).number, True
        elif operation == "<" and (_name(left), _name(right)) in _NEVER_MORE:
            yield self.node("==", left, right).number, True
            yield self.node("!=", left, right).number, False

    def decide(self, condition: Expression) -> bool:
        """Which way to go at `condition` in the present run."""
        known = self._known.get(condition.number)
        if known is not None:
            return known
        place = len(self._decided)
        answer = self._forced[place] if place < len(self._forced) else True
        self._decided.append(condition)
        self._known.update(self.consequences(condition, answer))
        return answer

    def follow(self, function: Callable[[], T], facts: Mapping[int, bool] | None = None) -> Tree[T]:
        """Everything that `function` may return, by the conditions that lead there.

        `facts` are conditions, by number, of which it is known how they turn out.

        Raises:
            Untraceable: when it does more than arithmetic, or branches too often.
        """
        runs = 0

        def grow(forced: tuple[bool, ...]) -> Tree[T]:
            nonlocal runs
            runs += 1
            if runs > _MOST_RUNS:
                raise Untraceable("too many branches")
            self._forced, self._decided, self._known = forced, [], dict(facts or {})
            try:
                value = function()
            except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
                raise Untraceable(str(error)) from error
            if len(self._decided) == len(forced):
                return Leaf(value)
            condition = self._decided[len(forced)]
            return Fork(condition, grow((*forced, True)), grow((*forced, False)))

        return grow(())


class SymbolicBatch:
    """A batch whose sums are symbols; its kind and `next_n` are given."""

    def __init__(
        self, trace: Trace, mode: Mode, next_n: int, captured: bool | None, has_lens: bool
    ) -> None:
        """`captured` None is a symbol too. With `has_lens` lengths exist, and are not known."""
        self.mode = mode
        self.next_n = next_n
        self.captured = trace.node("input", "captured") if captured is None else captured
        self.sequences = trace.node("input", "sequences")
        self.q_tokens = trace.node("input", "q_tokens")
        self.kv_tokens = trace.node("input", "kv_tokens")
        self.max_kv = trace.node("input", "max_kv")
        self.pairs = trace.node("input", "pairs")
        self.has_lens = has_lens

    @property
    def facts(self) -> dict[int, bool]:
        """What holds of every batch: there is a sequence, and each has a new token."""
        trace, found = self.q_tokens.trace, dict[int, bool]()
        for name in _AT_LEAST_ONE:
            found |= trace.consequences(trace.node("<", 0, trace.node("input", name)), True)
        return found

    @property
    def prefix_tokens(self) -> Expression:
        """As `Batch.prefix_tokens`."""
        return self.kv_tokens - self.q_tokens

    @property
    def lens(self) -> None:
        """As `Batch.lens`."""
        if self.has_lens:
            raise Untraceable("the lengths of the sequences")

    kv_lens = new_lens = lens
