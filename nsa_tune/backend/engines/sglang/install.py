"""Hooking. The hooks are put around the engine's methods once the engine itself has imported them.

SGLang's registry would import a hook's target at once, and applies what is registered for a target
anew when it is entered while it applies hooks: importing a module is such a moment, for another
plug-in may have a hook in the same module. So the methods are wrapped here, as the registry would.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pkgutil import resolve_name
from typing import Any

from nsa_tune.backend.engines.sglang.backend import around_init
from nsa_tune.backend.engines.sglang.edge import attempt, say_once
from nsa_tune.backend.engines.sglang.indexer import around_context_lens
from nsa_tune.backend.engines.sglang.post_import import when_imported
from nsa_tune.backend.engines.sglang.prefill import around_prefill
from nsa_tune.backend.engines.sglang.releases import (
    Symbol,
    checked,
    installed_version,
    release_of,
)
from nsa_tune.backend.engines.sglang.symbols import mismatch
from nsa_tune.backend.engines.sglang.v4 import around_sparse_prefill
from nsa_tune.backend.engines.sglang.v4_backend import around_v4_init

__all__ = ["OFF_SWITCH", "install", "switched_off", "wrapped"]

OFF_SWITCH = "NSA_TUNE_DISABLE"

_HOOKS: Mapping[str, Callable[..., Any]] = {
    "backend": around_init,
    "prefill": around_prefill,
    "indexer": around_context_lens,
    "v4_backend": around_v4_init,
    "v4_prefill": around_sparse_prefill,
}
"""By the symbol's name."""

_arranged: set[str] = set()
"""The modules that were seen to."""


def install() -> None:
    """Arrange the hooks for the installed SGLang, or say in one line why there are none."""
    if switched_off():
        say_once(logging.INFO, f"{OFF_SWITCH} is set: SGLang is left alone")
        return
    version = installed_version()
    release = None if version is None else release_of(version)
    if release is None:
        say_once(
            logging.WARNING,
            f"SGLang {version or 'of an unknown version'} is left alone: the plug-in was checked "
            f"with {checked()}",
        )
        return
    for module in dict.fromkeys(symbol.module for symbol in release.symbols):
        if module not in _arranged:
            _arranged.add(module)
            symbols = [symbol for symbol in release.symbols if symbol.module == module]
            when_imported(module, partial(attempt, "hooking SGLang", _hook, symbols))


def switched_off() -> bool:
    """Whether the environment switches the plug-in off."""
    return os.environ.get(OFF_SWITCH, "").strip().lower() not in ("", "0", "false", "no", "off")


def _hook(symbols: Sequence[Symbol]) -> None:
    for symbol in symbols:
        problem = mismatch(symbol)
        if problem is None:
            attempt(f"hooking {symbol.target}", _wrap, symbol)
        else:
            say_once(logging.WARNING, f"not hooked: {problem}")


def _wrap(symbol: Symbol) -> None:
    owner, _, name = symbol.target.rpartition(".")
    owner_class = resolve_name(owner)
    setattr(owner_class, name, wrapped(getattr(owner_class, name), _HOOKS[symbol.name]))


def wrapped(method: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """`method` with `hook` around it, which gets it as its first argument."""

    @wraps(method)
    def with_hook(*arguments: Any, **keywords: Any) -> Any:
        return hook(method, *arguments, **keywords)

    return with_hook
