"""The edge to an engine: nothing raises across it, and nothing is said twice."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MOST_SAID = 1000
"""Texts of one process: an error whose text is another one each time would fill log and memory."""


class LeftAlone(Exception):
    """This backend is not steered; the text says why."""


class EngineMustStop(Exception):
    """Other ranks wait for this one, and would for ever; the text says what to do about it.

    The one thing that crosses the edge: an engine that stops can be started again.
    """


class Edge:
    """The edge to one engine; its log is called after it."""

    def __init__(self, engine: str, log: str) -> None:
        """`log` is a logger's name. It must be one whose INFO lines the engine shows."""
        self.engine = engine
        """The engine's name, as it is written in a sentence."""
        self._log = logging.getLogger(log)
        self._said: set[str] = set()

    def attempt(
        self, what: str, call: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs
    ) -> T | None:
        """`call` with the rest; whatever it raises is logged once, and None is the answer.

        An engine must not stop because of its tuner: the only place here that catches everything
        but `EngineMustStop`.
        """
        try:
            return call(*arguments, **keywords)
        except EngineMustStop as stop:
            # On its way out the engine may wait for other ranks, and never show the error.
            self.say_once(logging.ERROR, str(stop))
            raise
        except Exception as error:
            if "bdb" in sys.modules and isinstance(error, sys.modules["bdb"].BdbQuit):
                raise  # somebody ends a debugger's session in here
            problem = f"{what} failed, so {self.engine} decides by itself: {_said_by(error)}"
            if self._is_new(problem, logging.WARNING):
                self._log.warning(problem, exc_info=True)
            return None

    def say_once(self, level: int, text: str) -> None:
        """Log `text`, once a process: an engine builds several backends, all alike."""
        if self._is_new(text, level):
            self._log.log(level, text)

    def _is_new(self, text: str, level: int) -> bool:
        if text in self._said:
            return False
        # An engine says only once why it must stop.
        if len(self._said) >= _MOST_SAID and level < logging.ERROR:
            return False
        self._said.add(text)
        return True

    def forget(self) -> None:
        """Forget what was said, so that it would be said again."""
        self._said.clear()


def _said_by(error: Exception) -> str:
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception:  # noqa: BLE001 - an exception may fail to say what it is
        return kind
