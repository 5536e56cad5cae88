"""Puts hooks around an engine's methods once the engine itself has imported them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pkgutil import resolve_name
from typing import Any

from nsa_tune.engines.edge import Edge
from nsa_tune.engines.post_import import when_imported
from nsa_tune.engines.symbols import Symbol, mismatch
from nsa_tune.engines.variables import asked_for

OFF_SWITCH = "NSA_TUNE_DISABLE"


def switched_off() -> bool:
    """Whether the environment switches the plug-ins off."""
    return asked_for(OFF_SWITCH)


def wrapped(method: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """`method` with `hook` around it, which gets it as its first argument."""

    @wraps(method)
    def with_hook(*arguments: Any, **keywords: Any) -> Any:
        return hook(method, *arguments, **keywords)

    return with_hook


class Hooking:
    """The hooks of one engine's plug-in, in this process."""

    def __init__(self, edge: Edge, hooks: Callable[[], Mapping[str, Callable[..., Any]]]) -> None:
        """`hooks` imports what is put around a method, by the name of its symbol.

        It is called once a module to hook is there: most processes of an engine have none, and need
        not load what decides.
        """
        self._edge = edge
        self._hooks = hooks
        self._arranged: set[str] = set()
        """The modules that were seen to."""

    def install(
        self, version: str | None, symbols: Sequence[Symbol] | None, *, checked: str
    ) -> None:
        """Arrange the hooks for the installed engine, or say in one line why there are none.

        `symbols` are those of the engine's `version`; None where the plug-in does not know it.
        `checked` names the versions that it does know.
        """
        engine = self._edge.engine
        if switched_off():
            self._edge.say_once(logging.INFO, f"{OFF_SWITCH} is set: {engine} is left alone")
            return
        if symbols is None:
            self._edge.say_once(
                logging.WARNING,
                f"{engine} {version or 'of an unknown version'} is left alone: the plug-in was "
                f"checked with {checked}",
            )
            return
        for module in dict.fromkeys(symbol.module for symbol in symbols):
            if module not in self._arranged:
                self._arranged.add(module)
                within = [symbol for symbol in symbols if symbol.module == module]
                then = partial(self._edge.attempt, f"hooking {engine}", self._hook, within)
                when_imported(module, then)

    def _hook(self, symbols: Sequence[Symbol]) -> None:
        for symbol in symbols:
            problem = mismatch(symbol)
            if problem is None:
                self._edge.attempt(f"hooking {symbol.target}", self._wrap, symbol)
            else:
                self._edge.say_once(logging.WARNING, f"not hooked: {problem}")

    def _wrap(self, symbol: Symbol) -> None:
        owner, _, name = symbol.target.rpartition(".")
        owner_class = resolve_name(owner)
        setattr(owner_class, name, wrapped(getattr(owner_class, name), self._hooks()[symbol.name]))
