"""The plug-in for an engine, and how it puts hooks around the engine's methods.

It does so once the engine itself has imported them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from nsa_tune.engines.edge import Edge
from nsa_tune.engines.post_import import when_imported
from nsa_tune.engines.releases import KnownReleases, Release
from nsa_tune.engines.switches import OFF_SWITCH, switched_off
from nsa_tune.engines.symbols import Symbol, mismatch


@dataclass(frozen=True, slots=True)
class Plugin:
    """What the plug-ins differ in, as far as loading one and looking after its hooks goes."""

    edge: Edge
    group: str
    """The group of entry points that the engine loads plug-ins from."""
    allow_list: str
    """The environment variable that names the plug-ins that may load."""
    loader: str
    """"module:function" by which the engine loads them."""
    hook_table: str
    """"module:mapping" of the hooks by the name of their symbol. It is imported once a module to
    hook is there: most processes of an engine have none, and need not load what decides."""
    releases: KnownReleases[Any]

    @property
    def engine(self) -> str:
        """The engine's name, as it is written in a sentence."""
        return self.edge.engine

    def hooks(self) -> Mapping[str, Callable[..., Any]]:
        """What is put around a method, by the name of its symbol."""
        hooks: Mapping[str, Callable[..., Any]] = resolve_name(self.hook_table)
        return hooks

    def symbols(self) -> tuple[Symbol, ...] | None:
        """What is hooked in the installed version; None where the plug-in does not know it."""
        release: Release | None = self.releases.installed()
        return None if release is None else release.symbols


def wrapped(method: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """`method` with `hook` around it, which gets it as its first argument."""

    @wraps(method)
    def with_hook(*arguments: Any, **keywords: Any) -> Any:
        return hook(method, *arguments, **keywords)

    return with_hook


@dataclass(frozen=True, slots=True)
class Hook:
    """A hook and its place. It can be taken off, so that calls there cost nothing."""

    owner: Any
    """The class or module that has the method or function."""
    name: str
    original: Callable[..., Any]
    hooked: Callable[..., Any]

    @property
    def is_off(self) -> bool:
        """Whether it was taken off, and can be put on again."""
        return vars(self.owner).get(self.name) is self.original

    def put_on(self) -> None:
        """Have calls go through the hook."""
        self._replace(self.original, self.hooked)

    def take_off(self) -> None:
        """Leave calls to the engine; where another plug-in has wrapped the hook, it stays."""
        self._replace(self.hooked, self.original)

    def _replace(self, old: Callable[..., Any], new: Callable[..., Any]) -> None:
        owners = [self.owner]
        if not isinstance(self.owner, type):
            # Other modules may have imported a function by its name. One that is no plain module
            # may load what it stands for when it is looked at.
            owners += [other for other in [*sys.modules.values()] if type(other) is ModuleType]
        for owner in owners:
            if vars(owner).get(self.name) is old:
                setattr(owner, self.name, new)


HOOKS_IN_PLACE: dict[str, Hook] = {}
"""By the name of the symbol; those that are taken off too."""
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
    found = resolve_name(owner)
    original = getattr(found, name)
    hook = Hook(found, name, original, wrapped(original, plugin.hooks()[symbol.name]))
    setattr(found, name, hook.hooked)
    HOOKS_IN_PLACE[symbol.name] = hook
