"""Reading JSON that a stranger sent: each value is of its kind and of a bearable length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nsa_tune._errors import UsageError

_LONGEST_TEXT = 400
_MOST_ITEMS = 64
_LONGEST_LIBRARIES = 2**12
_MOST_NUMBER = 2**31


def parsed(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises:
        UsageError: when it is none.
    """
    try:
        document = json.loads(data)
    except (RecursionError, ValueError) as error:
        raise UsageError(f"the body is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError("the body is no JSON object")
    return document


def text_in(document: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """The text `name`, without control characters; `default` where it is absent.

    Raises:
        UsageError: when it is no such text, or absent and there is no default.
    """
    value = document.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not value.isprintable():
        raise UsageError(f"{name!r} must be a text of at most {_LONGEST_TEXT} characters")
    return value


def number_in(document: Mapping[str, Any], name: str, default: int) -> int:
    """The whole number `name` from 0; `default` where it is absent.

    Raises:
        UsageError: when it is no such number.
    """
    value = document.get(name, default)
    if type(value) is not int or not 0 <= value < _MOST_NUMBER:
        raise UsageError(f"{name!r} must be a whole number from 0")
    return value


def seconds_in(document: Mapping[str, Any], name: str) -> float | None:
    """The number of seconds `name`; None where it is absent.

    Raises:
        UsageError: when it is no such number.
    """
    value = document.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < _MOST_NUMBER:
        raise UsageError(f"{name!r} must be a number of seconds")
    return float(value)


def names_in(document: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The list of texts `name`; empty where it is absent.

    Raises:
        UsageError: when it is none, or long.
    """
    value = document.get(name, [])
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        raise UsageError(f"{name!r} must be a list of at most {_MOST_ITEMS} names")
    return tuple(text_in({name: word}, name) for word in value)


def libraries_in(document: Mapping[str, Any]) -> tuple[tuple[str, str], ...] | None:
    """(distribution, version) of each library, sorted, from a JSON object or a list of pairs; None
    where it is absent.

    Raises:
        UsageError: when it is neither.
    """
    name = "libraries"
    value = document.get(name)
    if value is None:
        return None
    try:
        pairs = dict(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name!r} must be an object: distribution to version") from None
    if len(pairs) > _MOST_ITEMS or not all(isinstance(word, str) for word in pairs):
        raise UsageError(f"{name!r} must have at most {_MOST_ITEMS} distributions")
    libraries = tuple(sorted((text_in({name: word}, name), text_in(pairs, word)) for word in pairs))
    if sum(len(word) for pair in libraries for word in pair) > _LONGEST_LIBRARIES:
        raise UsageError(f"{name!r} must have at most {_LONGEST_LIBRARIES} characters")
    return libraries
