"""Formulas: arithmetic on a batch, written as text.

A point declares its features as formulas, a guard its limits, a baseline its condition:
``q_tokens * 576 >= 2147483648``. Each is written once. `function_of` evaluates a single one,
`backend.dispatch.compiled` writes those of a whole table down as one function, and nothing else
decides anything.

A formula may name the fields below, values that its point declares, and functions that the point
brings. What a setting fixes (heads, SMs) stands in it as a number.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import count
from string import punctuation
from types import CodeType
from typing import Any, NamedTuple

from nsa_tune.backend.types.batch import Batch, Mode

FIELDS: Mapping[str, str] = {
    "batch_size": "batch.batch_size",
    "q_tokens": "batch.q_tokens",
    "kv_tokens": "batch.kv_tokens",
    "rows": "1.0 * q_tokens",
    "keys": "1.0 * kv_tokens",
    "max_kv": "batch.max_kv",
    "pairs": "batch.pairs",
    "next_n": "batch.next_n",
    "captured": "batch.captured",
    "prefix_tokens": "kv_tokens - q_tokens",
    "max_new": "max(batch.new_lens) if batch.new_lens else min(batch.q_tokens, batch.max_kv)",
    "is_extend": "batch.mode is EXTEND",
    "is_verify": "batch.mode is TARGET_VERIFY",
}
"""What every formula may name. Rows and keys are floats for the features, as a product of floats
takes a third of a mixed one's time; limits count in whole tokens."""

NO_ROWS = "q_tokens <= 0"
"""The condition of a batch without a query. No constructor of Batch makes one; an idle rank of data
parallelism has one."""

_ALWAYS: Mapping[str, Any] = {
    "EXTEND": Mode.EXTEND,
    "TARGET_VERIFY": Mode.TARGET_VERIFY,
    "inf": float("inf"),
    "max": max,
    "min": min,
}
_BETWEEN_WORDS = str.maketrans(dict.fromkeys(punctuation.replace("_", ""), " "))


class Limit(NamedTuple):
    """A hard limit in one setting."""

    passed: str
    """A formula that is true of a batch on which the arm must not run."""
    reason: str
    """One clause that says so; formulas in braces are filled in, as in an f-string."""


class Switch(NamedTuple):
    """One of two choices, by a batch."""

    condition: str
    """A formula."""
    yes: str
    no: str


class Value(NamedTuple):
    """A number that several formulas name, computed once for a batch."""

    formula: str
    """From a batch's sums. Of several names, separated by ", ", as many formulas."""
    by_lengths: str | None = None
    """What counts instead where the length of each sequence is known."""


class Formulas(NamedTuple):
    """What a point computes of a batch in one setting."""

    values: Mapping[str, Value]
    """By name, or by several names separated by ", "; a value may name those before it."""
    features: tuple[str, ...]
    """Names of values or fields, in the order of a latency model's weights."""
    coordinates: Mapping[str, str]
    """Where a batch lies, for interpolation: formulas by name."""
    regime: str = "0"
    """A formula: batches of different regimes have latency models of their own."""
    functions: Mapping[str, Callable[..., Any]] = {}
    """Functions that the formulas call."""
    regimes: frozenset[int] | None = None
    """All that the formula gives; None where nobody has counted them."""

    def texts(self) -> Iterator[str]:
        """Every formula, for a digest."""
        for names, value in self.values.items():
            yield f"{names} = {value.formula} or {value.by_lengths}"
        yield " ".join(self.features)
        yield from (f"{name} = {formula}" for name, formula in self.coordinates.items())
        yield self.regime


def larger(one: str, other: str) -> str:
    """The formula of the larger of two; a call of `max` would cost more than the rest."""
    return f"({other} if {one} < {other} else {one})"


def smaller(one: str, other: str) -> str:
    """The formula of the smaller of two."""
    return f"({other} if {other} < {one} else {one})"


@lru_cache(maxsize=4096)
def names_in(formula: str) -> frozenset[str]:
    """The words of a formula: the names that it uses, keywords and numbers among them."""
    return frozenset(_words(formula))


def _words(text: str) -> list[str]:
    # In a third of the time that a regular expression takes.
    return text.translate(_BETWEEN_WORDS).split()


# --- functions from formulas


@lru_cache(maxsize=4096)
def function_of(formula: str) -> Callable[[Batch], Any]:
    """The function from a batch to the value of a formula over its fields alone."""
    return _function([], formula, {})


def evaluated(formulas: Formulas, result: str) -> Callable[[Batch], Any]:
    """The function from a batch to `result`, a formula that may name the point's values."""
    lines = assignments(formulas.values, [result], frozenset())
    return _function(lines, result, formulas.functions)


def refusal(limit: Limit, batch: Batch) -> str | None:
    """Why the limit forbids an arm on `batch`; None where it does not."""
    if not function_of(limit.passed)(batch):
        return None
    if "{" not in limit.reason:
        return limit.reason
    text: str = function_of(f"f{limit.reason!r}")(batch)
    return text


def assignments(
    values: Mapping[str, Value], wanted: Iterable[str], known: Collection[str]
) -> list[str]:
    """Lines that assign the values that the formulas `wanted` need and that are not `known`."""
    needed = set().union(*map(names_in, wanted))
    lines: list[str] = []
    for names, value in reversed([*values.items()]):
        parts = names_in(names)
        if needed.isdisjoint(parts) or not parts.isdisjoint(known):
            continue
        formula = value.formula
        needed |= names_in(formula)
        if value.by_lengths is not None:
            needed |= names_in(value.by_lengths)
            formula = f"({formula}) if batch.kv_lens is None else {value.by_lengths}"
        lines.append(f"{names} = {formula}")
    return lines[::-1]


def fields_of(code: Iterable[str], known: Mapping[str, str] = {}) -> list[str]:
    """Lines that assign the fields of a batch which `code` names; `known` ones have that value."""
    used = {*_words("\n".join(code))}
    # Those that name others come after them.
    for name in used & FIELDS.keys():
        used |= names_in(FIELDS[name])
    return [f"{name} = {known.get(name, one)}" for name, one in FIELDS.items() if name in used]


def _function(
    lines: Iterable[str], result: str, functions: Mapping[str, Callable[..., Any]]
) -> Callable[[Batch], Any]:
    body = [*fields_of([*lines, result]), *lines, f"return {result}"]
    source = "def formula(batch):\n" + "".join(f"    {line}\n" for line in body)
    function: Callable[[Batch], Any] = defined(source, "formula", functions)
    return function


_NUMBERS = count(1)


def defined(
    source: str, name: str, names: Mapping[str, Any], attributes: Collection[str] = ()
) -> Any:
    """The function `name` that `source` defines; tracebacks and debuggers show its lines.

    Raises:
        ValueError: when it uses more than numbers, fields of a batch, `attributes` and `names`.
    """
    namespace = {**_ALWAYS, **names, "__builtins__": {}}
    module = _compiled(source, name)
    _check(module, {name, *namespace, *_ATTRIBUTES, *attributes})
    exec(module, namespace)
    return namespace[name]


@lru_cache(maxsize=256)
def _compiled(source: str, name: str) -> CodeType:
    """The code of `source`: the same table may be opened again, and settings share formulas."""
    file = f"<nsa_tune {name} {next(_NUMBERS)}>"
    module = compile(source, file, "exec")
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    for code in module.co_consts:
        if isinstance(code, CodeType):  # the function's, which may outlive the module's
            weakref.finalize(code, linecache.cache.pop, file, None)
    return module


_ATTRIBUTES = frozenset({*_words(" ".join(FIELDS.values())), "__class__", "kv_lens"})


def _check(code: CodeType, names: Collection[str]) -> None:
    """Pass when `code` reaches for nothing else: no import, no other attribute, no inner function.

    The texts are ours and numbers are written by `repr`, so this never fails. It stands between
    a mistake there and code that runs in an engine.
    """
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    foreign = [one for one in code.co_names if one not in names]
    if code.co_name != "<module>":
        foreign += [one.co_name for one in inner]
    if foreign:
        raise ValueError(f"generated code must not use {', '.join(foreign)}")
    for one in inner:
        _check(one, names)
