"""Single values of a database that somebody else may have written."""

from __future__ import annotations


def text_of(value: object) -> str:
    """`value`, which is a text.

    Raises:
        ValueError: when it is anything else, as SQLite allows in every column.
    """
    if type(value) is not str:
        raise ValueError(f"{value!r} is no text")
    return value


def count_of(value: object) -> int:
    """`value`, which is a whole number from 0.

    Raises:
        ValueError: when it is anything else.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
