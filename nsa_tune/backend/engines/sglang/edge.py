"""The edge to the engine: nothing raises across it, and nothing is said twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["attempt", "say_once"]

_log = logging.getLogger("nsa_tune.sglang")
_said: set[str] = set()

P = ParamSpec("P")
T = TypeVar("T")


def attempt(
    what: str, call: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs
) -> T | None:
    """`call` with the rest; whatever it raises is logged once, and None is the answer.

    An engine must not stop because of its tuner: the only place here that catches everything.
    """
    try:
        return call(*arguments, **keywords)
    except Exception as error:  # noqa: BLE001 - the engine goes on, whatever it was
        problem = f"{what} failed, so SGLang decides by itself: {type(error).__name__}: {error}"
        if problem not in _said:
            _said.add(problem)
            _log.warning(problem, exc_info=True)
        return None


def say_once(level: int, text: str) -> None:
    """Log `text`, once a process: an engine builds several backends, all alike."""
    if text not in _said:
        _said.add(text)
        _log.log(level, text)
