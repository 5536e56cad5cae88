"""Puts hooks around an engine's methods once the engine itself has imported them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pkgutil import resolve_name
from typing import Any

from nsa_tune.engines.plugin import Plugin
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


_arranged: set[str] = set()
"""The modules of engines that were seen to in this process."""


def install(plugin: Plugin) -> None:
    """Arrange the hooks for the installed engine, or say in one line why there are none."""
    edge, releases, symbols = plugin.edge, plugin.releases, plugin.symbols()
    if switched_off():
        edge.say_once(logging.INFO, f"{OFF_SWITCH} is set: {edge.engine} is left alone")
        return
    if symbols is None:
        version = releases.installed_version() or "of an unknown version"
        edge.say_once(
            logging.WARNING,
            f"{edge.engine} {version} is left alone: the plug-in was checked with "
            f"{releases.checked()}",
        )
        return
    for module in dict.fromkeys(symbol.module for symbol in symbols):
        if module not in _arranged:
            _arranged.add(module)
            within = [symbol for symbol in symbols if symbol.module == module]
            hook = partial(edge.attempt, f"hooking {edge.engine}", _hook, plugin, within)
            when_imported(module, hook)


def _hook(plugin: Plugin, symbols: Sequence[Symbol]) -> None:
    for symbol in symbols:
        problem = mismatch(symbol)
        if problem is None:
            plugin.edge.attempt(f"hooking {symbol.target}", _wrap, plugin, symbol)
        else:
            plugin.edge.say_once(logging.WARNING, f"not hooked: {problem}")


def _wrap(plugin: Plugin, symbol: Symbol) -> None:
    owner, _, name = symbol.target.rpartition(".")
    owner_class = resolve_name(owner)
    setattr(owner_class, name, wrapped(getattr(owner_class, name), plugin.hooks()[symbol.name]))
