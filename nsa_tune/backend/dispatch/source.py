"""Writing traced expressions and conditions down as the body of a Python function of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from nsa_tune.backend.dispatch.tracing import Expression, Fork, Leaf, Trace, Tree, Untraceable
from nsa_tune.backend.types.batch import MAX_TOKENS

__all__ = ["Scope", "Writer", "merged"]

T = TypeVar("T")

_MOST_LINES = 2000
_QUOTIENTS = ("//", "/")
_MANY = 3
"""Products of a number for which a copy of it pays."""
_INPUTS = ("sequences", "q_tokens", "kv_tokens", "max_kv", "pairs")


class Scope(NamedTuple):
    """A place in the function: what is known there, what has a name, and how far it is indented."""

    facts: Mapping[int, bool]
    """Conditions by number, and how they have turned out."""
    names: Mapping[int, str]
    """Expressions by number, and the variables that hold them."""
    depth: int
    floats: Mapping[int, str] = MappingProxyType({})
    """Whole numbers, and the variables that hold them as floating-point numbers."""

    def inside(self, depth: int = 1) -> Scope:
        """The same, further in."""
        return self._replace(depth=self.depth + depth)


class Writer:
    """The lines of one function."""

    def __init__(self, trace: Trace) -> None:
        self.lines: list[str] = []
        self._trace = trace
        self._variables = 0

    def line(self, text: str, scope: Scope) -> None:
        """Write one line."""
        self.lines.append("    " * scope.depth + text)

    def variable(self) -> str:
        """A name that nothing has yet."""
        self._variables += 1
        return f"v{self._variables}"

    def branch(
        self, condition: str, scope: Scope, yes: Callable[[Scope], None],
        no: Callable[[Scope], None],
    ) -> None:  # fmt: skip
        """Write both ways of a condition that is text already."""
        self.line(f"if {condition}:", scope)
        yes(scope.inside())
        self.line("else:", scope)
        no(scope.inside())

    def fork(self, tree: Tree[T], scope: Scope, then: Callable[[T, Scope], None]) -> None:
        """Write the conditions of `tree` that are still open, and `then` at each of its leaves."""
        if isinstance(tree, Leaf):
            then(tree.value, scope)
            return
        known = scope.facts.get(tree.condition.number)
        if known is not None:
            self.fork(tree.yes if known else tree.no, scope, then)
            return
        scope = self._divided(tree.condition, scope)
        self.branch(
            self.value(tree.condition, scope),
            scope,
            lambda here: self.fork(tree.yes, self._knowing(tree.condition, True, here), then),
            lambda here: self.fork(tree.no, self._knowing(tree.condition, False, here), then),
        )

    def _divided(self, condition: Expression, scope: Scope) -> Scope:
        """Write a variable for each quotient in `condition`: models often have the same."""
        found: dict[int, Expression] = {}
        self._collect(condition, scope, found)
        quotients = [node for node in found.values() if node.operation in _QUOTIENTS]
        divisors: dict[int, Expression] = {}
        for node in quotients:
            self._collect(node.arguments[1], scope, divisors)
        for number, node in found.items():
            if node.operation in _QUOTIENTS or (number in divisors and node.operation == "+"):
                scope = self._assigned(number, node, scope)
        return scope

    def _assigned(self, number: int, node: Expression, scope: Scope) -> Scope:
        name = self.variable()
        self.line(f"{name} = {self.value(node, scope)}", scope)
        return scope._replace(names={**scope.names, number: name})

    def _knowing(self, condition: Expression, truth: bool, scope: Scope) -> Scope:
        settled = self._trace.consequences(condition, truth)
        return scope._replace(facts={**scope.facts, **settled})

    def pruned(self, tree: Tree[T], scope: Scope) -> Tree[T]:
        """`tree` without the conditions that are known."""
        if isinstance(tree, Leaf):
            return tree
        known = scope.facts.get(tree.condition.number)
        if known is not None:
            return self.pruned(tree.yes if known else tree.no, scope)
        yes = self.pruned(tree.yes, self._knowing(tree.condition, True, scope))
        no = self.pruned(tree.no, self._knowing(tree.condition, False, scope))
        return Fork(tree.condition, yes, no)

    def refusal(self, tree: Tree[object], scope: Scope) -> bool | str:
        """A pruned tree of reasons as one condition: whether there is a reason."""
        if isinstance(tree, Leaf):
            return tree.value is not None
        yes, no = self.refusal(tree.yes, scope), self.refusal(tree.no, scope)
        if yes == no:
            return yes
        condition = self.value(tree.condition, scope)
        if yes is True:
            return condition if no is False else f"({condition} or {no})"
        if yes is False:
            return f"(not {condition})" if no is True else f"(not {condition} and {no})"
        if no is True:
            return f"(not {condition} or {yes})"
        if no is False:
            return f"({condition} and {yes})"
        return f"({yes} if {condition} else {no})"

    def any_refusal(self, trees: Iterable[Tree[object]], scope: Scope) -> bool | str:
        """As `refusal` of several; of upper bounds of one number only the least."""
        bounds: dict[int, tuple[int, Expression]] = {}
        conditions: list[str] = []
        for tree in trees:
            if (bounded := _bounds(tree)) is not None:
                for least, node in bounded:
                    known = bounds.get(node.number)
                    bounds[node.number] = (min(least, known[0]) if known else least, node)
                continue
            refused = self.refusal(tree, scope)
            if refused is True:
                return True
            if refused is not False:
                conditions.append(str(refused))
        limits = [
            f"{self.value(node, scope)} >= {least}" for least, node in _reachable(bounds.values())
        ]
        return " or ".join([*limits, *conditions]) or False

    def select(self, tree: Tree[T], scope: Scope, text: Callable[[T], str]) -> str:
        """A tree as one conditional expression of its leaves' texts."""
        if isinstance(tree, Leaf):
            return text(tree.value)
        known = scope.facts.get(tree.condition.number)
        if known is not None:
            return self.select(tree.yes if known else tree.no, scope, text)
        yes = self.select(tree.yes, self._knowing(tree.condition, True, scope), text)
        no = self.select(tree.no, self._knowing(tree.condition, False, scope), text)
        return yes if yes == no else f"({yes} if {self.value(tree.condition, scope)} else {no})"

    def value(self, node: object, scope: Scope) -> str:
        """An expression or plain number as text."""
        if not isinstance(node, Expression):
            return repr(node)
        name = scope.names.get(node.number)
        if name is not None:
            return name
        if node.operation == "input":
            return f"batch.{node.arguments[0]}"
        if node.operation == "local":
            return str(node.arguments[0])
        texts = [self.value(argument, scope) for argument in node.arguments]
        weighted = _weighted(node)
        if weighted is not None and weighted.number in scope.floats:
            texts[1] = scope.floats[weighted.number]
        if node.operation == "neg":
            return f"(-{texts[0]})"
        if node.operation == "*":
            for truth, amount in ((0, 1), (1, 0)):
                if _is_truth(node.arguments[truth]):
                    # Half the time of a product, and none for what is not wanted.
                    return f"({texts[amount]} if {texts[truth]} else 0)"
        return f"({texts[0]} {node.operation} {texts[1]})"

    def known(self, scope: Scope) -> str:
        """All that is known in `scope`, as one condition on a batch."""
        plain = Scope({}, {}, 0)
        conditions = [
            f"{'' if truth else 'not '}{self.value(self._trace.numbered(number), plain)}"
            for number, truth in scope.facts.items()
        ]
        return " and ".join(conditions) or "True"

    def share(self, groups: Sequence[object], scope: Scope) -> Scope:
        """Write a variable for each expression that is used more than once, and by more than one
        of `groups` if there are several expressions of these."""
        users: Counter[int] = Counter()
        uses: Counter[int] = Counter()
        found: dict[int, Expression] = {}
        for group in groups:
            own: dict[int, Expression] = {}
            uses[getattr(group, "number", -1)] += 1
            self._collect(group, scope, own)
            users.update(own.keys())
            found = {**found, **own}
        for node in found.values():
            uses.update(one.number for one in node.arguments if isinstance(one, Expression))
        for number, node in found.items():
            if uses[number] > 1 and (users[number] > 1 or len(groups) == 1):
                scope = self._assigned(number, node, scope)
        return scope

    def floats(self, models: Sequence[object], scope: Scope) -> Scope:
        """Write floating-point copies of the whole numbers that many weights multiply: Python
        multiplies two numbers of one type in half the time."""
        found: dict[int, Expression] = {}
        for model in models:
            self._collect(model, scope, found)
        weighted = [_weighted(node) for node in found.values()]
        counts = Counter(node.number for node in weighted if node is not None)
        nodes = {node.number: node for node in weighted if node is not None}
        for number, count in counts.items():
            if count >= _MANY and nodes[number].is_whole:
                name = self.variable()
                self.line(f"{name} = {self.value(nodes[number], scope)} + 0.0", scope)
                scope = scope._replace(floats={**scope.floats, number: name})
        return scope

    def _collect(self, node: object, scope: Scope, found: dict[int, Expression]) -> None:
        """What `node` is made of, and then itself."""
        if not isinstance(node, Expression) or node.number in (*scope.names, *found):
            return
        if node.operation not in ("input", "local"):
            for argument in node.arguments:
                self._collect(argument, scope, found)
            found[node.number] = node

    def conditions(self, tree: Tree[T]) -> list[Expression]:
        """Every condition of `tree`."""
        if isinstance(tree, Leaf):
            return []
        return [tree.condition, *self.conditions(tree.yes), *self.conditions(tree.no)]

    def function(self, tail: Sequence[str], names: Mapping[str, object]) -> Callable[[Any], Any]:
        """The function of `batch` with these lines and then `tail`; `names` are its globals.

        Terms that cannot be computed go the slow way, which knows what to do.

        Raises:
            Untraceable: when it became too long.
        """
        if len(self.lines) > _MOST_LINES:
            raise Untraceable("too many lines")
        body = "\n".join([*self.lines, *(f"        {line}" for line in tail)])
        head = []
        for name in _INPUTS:
            if body.count(f"batch.{name}") > 1:
                head.append(f"        {name} = batch.{name}")
                body = body.replace(f"batch.{name}", name)
        ways = ["    except (ArithmeticError, ValueError):", "        return slow(batch)"]
        text = "\n".join(["def function(batch):", "    try:", *head, body, *ways])
        namespace = dict(names)
        exec(compile(text, "<decisions>", "exec"), namespace)
        function: Callable[[Any], Any] = namespace["function"]  # type: ignore[assignment]
        return function


def merged(tree: Tree[tuple[T, ...]]) -> Tree[tuple[T, ...]]:
    """`tree` without the conditions on which nothing depends."""
    if isinstance(tree, Leaf):
        return tree
    yes, no = merged(tree.yes), merged(tree.no)
    return yes if _alike(yes, no) else Fork(tree.condition, yes, no)


def _alike(one: Tree[tuple[T, ...]], other: Tree[tuple[T, ...]]) -> bool:
    if isinstance(one, Leaf) or isinstance(other, Leaf):
        return (
            isinstance(one, Leaf)
            and isinstance(other, Leaf)
            and [*map(_identity, one.value)] == [*map(_identity, other.value)]
        )
    same = one.condition.number == other.condition.number
    return same and _alike(one.yes, other.yes) and _alike(one.no, other.no)


def _identity(value: object) -> tuple[str, object]:
    return ("", value.number) if isinstance(value, Expression) else (type(value).__name__, value)


def _is_truth(node: object) -> bool:
    return isinstance(node, Expression) and node.is_truth


def _weighted(node: Expression) -> Expression | None:
    """What a weight multiplies in a product with one."""
    if node.operation != "*" or type(node.arguments[0]) is not float:
        return None
    return node.arguments[1] if isinstance(node.arguments[1], Expression) else None


def _reachable(
    bounds: Collection[tuple[int, Expression]],
) -> Iterator[tuple[int, Expression]]:
    """Of upper bounds those that a batch within all the others can pass."""
    most = dict.fromkeys(_INPUTS[:4], MAX_TOKENS)
    plain = {number for number, (_, node) in enumerate(bounds) if node.operation == "input"}
    for number, (least, node) in enumerate(bounds):
        if number in plain:
            yield least, node
            name = str(node.arguments[0])
            if name in most:
                most[name] = min(most[name], least - 1)
    # No sum is more than kv_tokens, and each sequence has a new token.
    most = {name: min(tokens, most["kv_tokens"]) for name, tokens in most.items()}
    most["sequences"] = min(most["sequences"], most["q_tokens"])
    for number, (least, node) in enumerate(bounds):
        largest = None if number in plain else _largest(node, most)
        if number not in plain and (largest is None or largest >= least):
            yield least, node


def _largest(node: object, most: Mapping[str, int]) -> int | None:
    """What an expression that only grows with its inputs is at most; None of others."""
    if not isinstance(node, Expression):
        return node if type(node) is int and node >= 0 else None
    if node.operation == "input":
        return most.get(str(node.arguments[0]))
    if node.operation not in ("+", "*", "//"):
        return None
    left, right = (_largest(argument, most) for argument in node.arguments)
    if left is None or right is None:
        return None
    if node.operation == "//":
        divisor = node.arguments[1]
        return left // divisor if type(divisor) is int and divisor > 0 else None
    return left + right if node.operation == "+" else left * right


def _bounds(tree: Tree[object]) -> list[tuple[int, Expression]] | None:
    """Of a tree that refuses from some whole numbers on, these and what is compared with them."""
    if isinstance(tree, Leaf):
        return [] if tree.value is None else None
    if not isinstance(tree.yes, Leaf) or tree.yes.value is None:
        return None
    others = _bounds(tree.no)
    if others is None:
        return None
    least, node = tree.condition.arguments[0], tree.condition.arguments[-1]
    if type(least) is not int or not isinstance(node, Expression) or not node.is_whole:
        return None
    steps = {"<": 1, "<=": 0}
    operation = tree.condition.operation
    return [(least + steps[operation], node), *others] if operation in steps else None
