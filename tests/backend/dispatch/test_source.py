"""Limits as conditions of code: those that others imply are left out, and none that matters."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.dispatch.source import Scope, Writer, merged
from nsa_tune.backend.dispatch.tracing import Fork, Leaf, SymbolicBatch, Trace
from nsa_tune.backend.types.batch import Batch, Mode

Limit = Callable[[Batch], str | None]


def _refusal(limits: list[Limit]) -> bool | str:
    trace = Trace()
    batch = cast("Batch", SymbolicBatch(trace, Mode.EXTEND, 1, None, has_lens=False))
    trees = [trace.follow(lambda limit=limit: limit(batch)) for limit in limits]  # type: ignore[misc]
    return Writer(trace).any_refusal(trees, Scope({}, {}, 0))


def _kv(most: int) -> Limit:
    return lambda batch: "kv" if batch.kv_tokens > most else None


def _mixed(a: int, b: int, c: int, most: int) -> Limit:
    return lambda batch: "mixed" if a * (batch.q_tokens // b) + c * batch.sequences > most else None


def test_a_limit_that_another_implies_is_not_asked() -> None:
    assert _refusal([_mixed(3, 16, 1, 2**21), _kv(2**17)]) == "batch.kv_tokens >= 131073"
    assert "batch.sequences" in str(_refusal([_mixed(3, 16, 1, 2**17), _kv(2**17)]))
    assert "batch.sequences" in str(_refusal([_mixed(3, 16, 1, 2**21)]))


def test_a_limit_on_pairs_says_nothing_of_tokens() -> None:
    few: Limit = lambda batch: "pairs" if batch.pairs > 99 else None  # noqa: E731
    many: Limit = lambda batch: "product" if batch.pairs * 2 + batch.q_tokens > 150 else None  # noqa: E731

    assert "q_tokens" in str(_refusal([few, many, _kv(10)]))


def test_steps_of_one_guard_become_one_bound() -> None:
    def guard(batch: Batch) -> str | None:
        if batch.q_tokens > 900:
            return "far too many"
        return "too many" if batch.q_tokens > 300 else None

    assert _refusal([guard]) == "batch.q_tokens >= 301"


_small = st.integers(1, 40)


@given(
    st.lists(st.tuples(_small, _small, _small, st.integers(0, 2000)), max_size=3),
    st.integers(1, 400),
    st.integers(0, 999),
)
def test_what_is_asked_forbids_what_the_limits_forbid(
    mixed: list[tuple[int, int, int, int]], most_kv: int, seed: int
) -> None:
    limits = [*(_mixed(*one) for one in mixed), _kv(most_kv)]
    refusal, random = _refusal(limits), Random(seed)
    for _ in range(20):
        count = random.randint(1, 20)
        batch = Batch.extend(
            [random.randint(0, 9) for _ in range(count)],
            [random.randint(1, 30) for _ in range(count)],
        )

        forbidden = any(limit(batch) is not None for limit in limits)
        assert eval(str(refusal), {"batch": batch}) == forbidden


def test_conditions_on_which_nothing_depends_are_left_out() -> None:
    trace = Trace()
    batch = SymbolicBatch(trace, Mode.EXTEND, 1, None, has_lens=False)

    def terms(unused: int) -> tuple[object, ...]:
        last = 1 if batch.q_tokens > 7 else unused
        return (batch.kv_tokens, last) if batch.max_kv > 5 else (batch.sequences, 2)

    tree = merged(trace.follow(lambda: terms(1)))
    whole = merged(trace.follow(lambda: terms(3)))

    assert isinstance(tree, Fork)
    assert isinstance(tree.yes, Leaf)
    assert isinstance(whole, Fork)
    assert isinstance(whole.yes, Fork)


def test_a_whole_number_with_many_weights_is_copied_once() -> None:
    trace = Trace()
    batch = SymbolicBatch(trace, Mode.EXTEND, 1, None, has_lens=False)
    writer, scope = Writer(trace), Scope({}, {}, 0)
    models = [batch.q_tokens * weight + 1.5 * batch.kv_tokens for weight in (0.5, 0.25)]
    models += [0.125 * batch.q_tokens + 2.5 * batch.q_tokens, 3 * batch.q_tokens]

    scope = writer.floats(models, scope)
    assert writer.lines == []

    scope = writer.floats([*models, 0.75 * batch.q_tokens], scope)
    assert writer.lines == ["v1 = batch.q_tokens + 0.0"]
    assert writer.value(models[2], scope) == "((0.125 * v1) + (2.5 * v1))"
    assert writer.value(models[3], scope) == "(3 * batch.q_tokens)"


def test_a_product_with_a_truth_is_a_choice() -> None:
    trace = Trace()
    batch = SymbolicBatch(trace, Mode.EXTEND, 1, None, has_lens=False)
    larger = batch.q_tokens + (9 - batch.q_tokens) * (batch.q_tokens < 9)
    writer, scope = Writer(trace), Scope({}, {}, 0)

    text = writer.value(larger + (batch.max_kv > 5) * 7, scope)

    assert " if (5 < batch.max_kv) else 0" in text
    for new, most in ((3, 3), (20, 21)):
        one = Batch.extend([most - new], [new])
        assert eval(text, {"batch": one}) == max(new, 9) + 7 * (most > 5)


def test_quotients_of_a_condition_are_computed_once_with_their_divisors() -> None:
    trace = Trace()
    batch = SymbolicBatch(trace, Mode.EXTEND, 1, None, has_lens=False)
    writer = Writer(trace)

    def tree() -> int:
        tile = 16 + 48 * (batch.q_tokens >= 17)
        return 1 if batch.kv_tokens // tile < 4 else 0

    writer.fork(trace.follow(tree), Scope({}, {}, 0), lambda value, at: writer.line(f"{value}", at))

    assert writer.lines[:3] == [
        "v1 = (16 + (48 if (17 <= batch.q_tokens) else 0))",
        "v2 = (batch.kv_tokens // v1)",
        "if (v2 < 4):",
    ]
