"""Single values of a database that somebody else may have written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any


def text_of(value: object) -> str:
    """`value`, which is a text.

    Raises:
        ValueError: when it is anything else, as SQLite allows in every column.
    """
    if type(value) is not str:
        raise ValueError(f"{value!r} is no text")
    return value


def optional_text_of(value: object) -> str | None:
    """`value`, which is a text or nothing.

    Raises:
        ValueError: when it is anything else.
    """
    return None if value is None else text_of(value)


def number_of(value: object) -> float | None:
    """`value`, which is a number or nothing; a whole one that no float holds is infinite.

    Raises:
        ValueError: when it is anything else.
    """
    if value is None or type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return inf if value > 0 else -inf
    raise ValueError(f"{value!r} is not a number")


def count_of(value: object) -> int:
    """`value`, which is a whole number from 0.

    Raises:
        ValueError: when it is anything else.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def checked(checks: Sequence[Callable[[object], Any]], row: Sequence[object]) -> list[Any]:
    """The values of `row`, each by its own check.

    Raises:
        ValueError: when one is not what it should be.
    """
    return [check(value) for check, value in zip(checks, row, strict=True)]
