"""Tracing: the expressions and branches of plain functions, and what cannot be followed."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.dispatch.source import Scope, Writer
from nsa_tune.backend.dispatch.tracing import (
    Expression,
    Fork,
    Leaf,
    SymbolicBatch,
    Trace,
    Tree,
    Untraceable,
    values,
)
from nsa_tune.backend.types.batch import Batch, Mode

Function = Callable[[Any], Any]


def _followed(function: Function, captured: bool | None = None) -> Tree[Any]:
    trace = Trace()
    batch = SymbolicBatch(trace, Mode.EXTEND, 1, captured, False)
    return trace.follow(lambda: function(batch))


def _written(function: Function) -> Callable[[Batch], Any]:
    """`function` after it was traced and written down."""
    trace = Trace()
    batch = SymbolicBatch(trace, Mode.EXTEND, 1, None, False)
    writer = Writer(trace)

    def give(value: object, scope: Scope) -> None:
        shared = writer.share([value], scope)
        writer.line(f"return {writer.value(value, shared)}", shared)

    writer.fork(trace.follow(lambda: function(batch)), Scope({}, {}, 2), give)
    return writer.function((), {"slow": lambda batch: "slow"})


def _attended(batch: Any) -> Any:
    if batch.max_kv <= 2048:
        return batch.pairs
    return min(batch.pairs, batch.q_tokens * 2048)


def _mixed(batch: Any) -> Any:
    tiles = -(-batch.q_tokens // (batch.sequences * 128))
    if batch.captured or not batch.prefix_tokens:
        return tiles % 7 - batch.kv_tokens / 3
    return 2.5 * tiles + (1 - batch.sequences) / batch.q_tokens


def _limits(batch: Any) -> Any:
    if batch.q_tokens > 19370 or (batch.q_tokens + 66) * 128 * 512 >= 2**31:
        return 1
    if batch.kv_tokens * 3 - 4 > 7 and batch.max_kv != 12 and 5 * batch.pairs <= 99:
        return 2
    if batch.q_tokens * 4 < 13 or 2 + batch.sequences <= 3:
        return 3
    return 4 if batch.sequences == 4 else 5


def _never_equal(batch: Any) -> Any:
    if batch.q_tokens < batch.kv_tokens:
        return 1 if batch.prefix_tokens == 0 else 2
    return 3 if batch.kv_tokens - batch.q_tokens != 0 else 4


@pytest.mark.parametrize("function", [_attended, _mixed, _limits, _never_equal])
@given(
    st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 40_000)), min_size=1, max_size=4),
    st.booleans(),
)
def test_what_is_written_computes_the_same(
    function: Function, lens: list[tuple[int, int]], captured: bool
) -> None:
    batch = Batch.extend([p for p, _ in lens], [n for _, n in lens], captured=captured).sums

    assert _WRITTEN[function](batch) == function(batch)  # type: ignore[index]


_WRITTEN = {one: _written(one) for one in (_attended, _mixed, _limits, _never_equal)}


def test_equal_expressions_are_one_object() -> None:
    trace = Trace()
    batch = SymbolicBatch(trace, Mode.DECODE, 1, False, False)

    assert batch.q_tokens + 1 is batch.q_tokens + 1
    assert batch.q_tokens + 1 is not batch.q_tokens + 1.0
    assert batch.prefix_tokens is batch.kv_tokens - batch.q_tokens


def test_a_branch_becomes_a_fork() -> None:
    tree = _followed(lambda batch: "long" if batch.max_kv > 9 else "short")

    assert isinstance(tree, Fork)
    assert tree.condition.operation == "<"
    assert (tree.yes, tree.no) == (Leaf("long"), Leaf("short"))


def test_a_condition_is_asked_once_however_it_is_put() -> None:
    def function(batch: Any) -> Any:
        if batch.max_kv > 9:
            return batch.max_kv <= 9 or not batch.max_kv > 9
        return not batch.max_kv > 9 and 2 * batch.max_kv <= 18

    tree = _followed(function)

    assert isinstance(tree, Fork)
    assert [bool(value) for value in values(tree) if not isinstance(value, Expression)]
    assert list(map(type, (tree.yes, tree.no))) == [Leaf, Leaf]


@pytest.mark.parametrize(
    ("limit", "plain"),
    [
        (lambda b: b.q_tokens > 19370, ("<", 19370)),
        (lambda b: (b.q_tokens + 66) * 128 * 512 >= 2**31, ("<=", 32702)),
        (lambda b: b.q_tokens * 3 > 100, ("<", 33)),
        (lambda b: b.q_tokens * 3 - 1 >= 100, ("<=", 34)),
    ],
    ids=["as it is", "added and multiplied", "multiplied", "subtracted"],
)
def test_a_limit_on_one_sum_becomes_a_threshold(limit: Function, plain: tuple[str, int]) -> None:
    tree = _followed(lambda batch: bool(limit(batch)))

    assert isinstance(tree, Fork)
    assert (tree.condition.operation, tree.condition.arguments[0]) == plain
    assert cast("Expression", tree.condition.arguments[1]).arguments == ("q_tokens",)


def test_a_division_stays_where_it_is() -> None:
    tree = _followed(lambda batch: bool(batch.q_tokens / 3 < 7))

    assert isinstance(tree, Fork)
    assert cast("Expression", tree.condition.arguments[0]).operation == "/"


@pytest.mark.parametrize(
    "function",
    [
        lambda batch: log2(batch.q_tokens),
        lambda batch: [1, 2][batch.sequences],
        lambda batch: {batch.q_tokens: 1},
        lambda batch: batch.q_tokens**2,
        lambda batch: int(batch.q_tokens),
        lambda batch: batch.q_tokens + "1",
        lambda batch: batch.colour,
        lambda batch: round(batch.q_tokens),
        lambda batch: 1 / 0,
        lambda batch: sum(1 for i in range(200) if batch.q_tokens > i * i),
    ],
    ids=[
        "a logarithm",
        "an index",
        "a key",
        "a power",
        "a conversion",
        "a text",
        "an unknown field",
        "rounding",
        "an error",
        "too many branches",
    ],
)
def test_what_is_more_than_arithmetic_cannot_be_followed(function: Function) -> None:
    with pytest.raises(Untraceable):
        _followed(function)


def test_a_truth_is_a_number_where_python_lets_it_be() -> None:
    tree = _followed(lambda batch: int(batch.prefix_tokens > 0))

    assert sorted(values(tree)) == [0, 1]


def test_a_sentence_may_name_a_symbol() -> None:
    tree = _followed(lambda batch: f"{batch.q_tokens} rows, {batch.kv_tokens / 2:.1f} keys")

    assert isinstance(tree, Leaf)
    assert "rows" in tree.value


def test_a_division_by_zero_goes_the_slow_way() -> None:
    function = _written(lambda batch: 1 / (batch.q_tokens - 5))

    assert function(Batch.extend([0], [6])) == 1
    assert function(Batch.extend([0], [5])) == "slow"


def test_a_product_over_its_own_factor_is_the_other_one() -> None:
    assert _followed(lambda batch: batch.q_tokens * 2048 / batch.q_tokens) == Leaf(2048.0)

    over_another = _followed(lambda batch: batch.q_tokens * 2048 / batch.sequences)
    not_whole = _followed(lambda batch: batch.q_tokens * 0.1 / batch.q_tokens)
    perhaps_zero = _followed(lambda batch: batch.prefix_tokens * 3 / batch.prefix_tokens)
    for tree in (over_another, not_whole, perhaps_zero):
        assert isinstance(tree, Leaf)
        assert isinstance(tree.value, Expression)
