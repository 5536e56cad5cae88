"""Formulas: what they may name, in which order values are computed, and what is refused."""

from __future__ import annotations

import gc
import linecache
import traceback
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.formula import (
    FIELDS,
    NO_ROWS,
    Formulas,
    Limit,
    Value,
    assignments,
    defined,
    evaluated,
    fields_of,
    function_of,
    larger,
    names_in,
    refusal,
    smaller,
)

RAGGED = Batch.extend([5, 0], [3, 9], captured=True)
VERIFY = Batch.verify([99, 40], 2)


def _formulas(values: dict[str, Value]) -> Formulas:
    return Formulas(values, (), {}, functions={"sum_of": sum})


# --- fields


@pytest.mark.parametrize(
    ("field", "of_ragged", "of_verify"),
    [
        ("batch_size", 2, 2),
        ("q_tokens", 12, 4),
        ("kv_tokens", 17, 139),
        ("rows", 12.0, 4.0),
        ("keys", 17.0, 139.0),
        ("max_kv", 9, 99),
        ("pairs", 5 * 3 + 6 + 45, 99 + 98 + 40 + 39),
        ("next_n", 1, 2),
        ("captured", True, False),
        ("prefix_tokens", 5, 135),
        ("max_new", 9, 2),
        ("is_extend", True, False),
        ("is_verify", False, True),
    ],
)
def test_a_formula_may_name_every_field(field: str, of_ragged: int, of_verify: int) -> None:
    assert function_of(field)(RAGGED) == of_ragged
    assert function_of(field)(VERIFY) == of_verify


def test_these_are_all_the_fields() -> None:
    (mark,) = (one for one in test_a_formula_may_name_every_field.pytestmark)  # type: ignore[attr-defined]
    assert {row[0] for row in mark.args[1]} == set(FIELDS)


def test_the_most_new_tokens_are_a_bound_where_lengths_are_unknown() -> None:
    assert function_of("max_new")(Batch.extend([0] * 3, [4, 2, 1]).sums) == 4
    assert function_of("max_new")(Batch.extend([9, 0], [1, 4]).sums) == 5


def test_only_a_batch_without_queries_has_no_rows() -> None:
    assert not function_of(NO_ROWS)(Batch.decode([1]))
    assert function_of(NO_ROWS)(replace(RAGGED, q_tokens=0))


def test_fields_are_read_once_and_known_ones_not_at_all() -> None:
    assert fields_of(["max_kv > 7", "max_kv + prefix_tokens"]) == [
        "q_tokens = batch.q_tokens",
        "kv_tokens = batch.kv_tokens",
        "max_kv = batch.max_kv",
        "prefix_tokens = kv_tokens - q_tokens",
    ]
    assert fields_of(["is_extend"], {"is_extend": "True"}) == ["is_extend = True"]


# --- values


def test_values_are_computed_in_order_and_only_if_needed() -> None:
    values = {
        "twice": Value("2 * q_tokens"),
        "unused": Value("1 / 0"),
        "more": Value("twice + kv_tokens"),
    }

    assert assignments(values, ["more > 3"], ()) == [
        "twice = 2 * q_tokens",
        "more = twice + kv_tokens",
    ]
    assert assignments(values, ["twice"], ()) == ["twice = 2 * q_tokens"]
    assert assignments(values, ["more"], {"twice"}) == ["more = twice + kv_tokens"]
    assert assignments(values, ["q_tokens"], ()) == []
    assert evaluated(_formulas(values), "more")(RAGGED) == 24 + 17


def test_one_formula_may_give_several_values() -> None:
    values = {"whole, rest": Value("q_tokens // 5, q_tokens % 5"), "both": Value("whole + rest")}

    assert evaluated(_formulas(values), "(rest, both)")(RAGGED) == (2, 4)


def test_by_lengths_counts_where_each_length_is_known() -> None:
    formulas = _formulas(
        {"squares": Value("q_tokens if captured else 0", "sum_of(batch.new_lens)")}
    )

    assert evaluated(formulas, "squares")(RAGGED.sums) == 12
    assert evaluated(formulas, "squares")(VERIFY.sums) == 0
    assert evaluated(formulas, "squares")(VERIFY) == 4


def test_a_value_that_is_declared_later_cannot_be_named() -> None:
    values = {"first": Value("second"), "second": Value("q_tokens")}

    with pytest.raises(ValueError, match="must not use second"):
        evaluated(_formulas(values), "first")


def test_the_digest_of_formulas_depends_on_every_one_of_them() -> None:
    plain = Formulas({"a": Value("q_tokens", "1")}, ("a",), {"x": "a"}, "0")
    others = [
        plain._replace(values={"a": Value("q_tokens")}),
        plain._replace(values={"a": Value("kv_tokens", "1")}),
        plain._replace(values={"b": Value("q_tokens", "1")}),
        plain._replace(features=("q_tokens",)),
        plain._replace(coordinates={"y": "a"}),
        plain._replace(coordinates={"x": "q_tokens"}),
        plain._replace(regime="1"),
    ]

    assert len({tuple(one.texts()) for one in [plain, *others]}) == 1 + len(others)


def test_names_are_words() -> None:
    assert names_in("a_1 + 2 * max(b, 3) if not c else 0x1") >= {"a_1", "max", "b", "c", "not"}


@given(st.integers(1, 99), st.integers(1, 99))
def test_the_larger_and_the_smaller_of_two(new: int, other: int) -> None:
    batch = Batch.extend([0], [new])

    assert function_of(larger("q_tokens", str(other)))(batch) == max(new, other)
    assert function_of(smaller("q_tokens", str(other)))(batch) == min(new, other)
    assert function_of(f"2 * {larger('q_tokens', '50')} - 1")(batch) == 2 * max(new, 50) - 1


# --- limits


def test_a_limit_that_is_not_passed_has_no_reason() -> None:
    assert refusal(Limit("q_tokens > 12", "{nonsense}"), RAGGED) is None


def test_a_reason_is_filled_in_by_formulas() -> None:
    limit = Limit("q_tokens > 11", "{q_tokens} rows pass 11, {2 * kv_tokens / 4:.1f} {{tokens}}")

    assert refusal(limit, RAGGED) == "12 rows pass 11, 8.5 {tokens}"


@pytest.mark.parametrize("words", ['it\'s "all"', "a\\b", "no\nlines", "batch max_new, if any"])
def test_the_words_of_a_reason_are_no_code(words: str) -> None:
    assert refusal(Limit("True", words), RAGGED) == words
    assert refusal(Limit("True", f"{words} {{q_tokens}}"), RAGGED) == f"{words} 12"


# --- what is refused


@pytest.mark.parametrize(
    "formula",
    [
        "q_tokens.real",
        "batch.lens",
        "batch.__class__.__base__",
        "().__class__.__mro__",
        "__import__('os')",
        "open('x')",
        "globals()",
        "getattr(batch, 'sums')",
        "sum(batch.kv_lens)",
        "[x for x in batch.kv_lens]",
        "(lambda: 1)()",
        "'{0.sums}'.format(batch)",
        "unheard_of",
    ],
)
def test_a_formula_holds_nothing_but_arithmetic_on_a_batch(formula: str) -> None:
    with pytest.raises(ValueError, match="generated code must not use"):
        function_of(formula)


@pytest.mark.parametrize(
    "line",
    ["import os", "from os import path", "def more(): pass", "global q", "x = slow.__self__"],
)
def test_a_function_holds_no_statement_but_what_formulas_need(line: str) -> None:
    source = f"def planned(batch):\n    {line}\n    q = slow(batch)\n    return q.kv\n"

    with pytest.raises(ValueError, match="generated code must not use"):
        defined(source, "planned", {"slow": len}, {"kv"})


def test_the_same_without_that_line_is_defined() -> None:
    """So that the tests above can fail."""
    source = "def planned(batch):\n    q = slow(batch)\n    return q.kv_lens\n"

    assert defined(source, "planned", {"slow": lambda batch: batch.sums})(RAGGED) is None
    with pytest.raises(ValueError, match="must not use sums"):
        defined(source.replace("kv_lens", "sums"), "planned", {"slow": len})
    assert defined(source.replace("kv_lens", "sums"), "planned", {"slow": lambda b: b}, {"sums"})


def test_code_that_is_not_refused_has_no_builtins_either() -> None:
    source = "def planned(batch):\n    import max\n"

    with pytest.raises(ImportError, match="__import__ not found"):
        defined(source, "planned", {})(RAGGED)


def test_a_formula_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(SyntaxError):
        function_of("q_tokens >")


# --- where it can be read


def test_a_traceback_shows_the_formula() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        function_of("kv_tokens / (q_tokens - 12)")(RAGGED)

    shown = "".join(traceback.format_exception(caught.value))
    assert 'File "<nsa_tune formula ' in shown
    assert "return kv_tokens / (q_tokens - 12)\n" in shown


def test_the_source_is_there_as_long_as_a_function_of_it() -> None:
    def source(number: int) -> str:
        return f"def planned(batch):\n    return {number}\n"

    one, two = defined(source(-1), "planned", {}), defined(source(-2), "planned", {})
    first, second = (function.__code__.co_filename for function in (one, two))
    # So many that the code of the first two is kept by their functions alone.
    for number in range(1000):
        defined(source(number), "planned", {})
    linecache.checkcache()

    assert linecache.getlines(first) == source(-1).splitlines(keepends=True)
    del one
    gc.collect()
    assert not linecache.getlines(first)
    assert linecache.getlines(second)
    assert two(RAGGED) == -2


def test_the_same_source_is_compiled_once_and_checked_each_time() -> None:
    source = "def planned(batch):\n    return q\n"
    one, two = defined(source, "planned", {"q": 1}), defined(source, "planned", {"q": 2})

    assert one.__code__ is two.__code__
    assert (one(RAGGED), two(RAGGED)) == (1, 2)
    with pytest.raises(ValueError, match="must not use q"):
        defined(source, "planned", {})
