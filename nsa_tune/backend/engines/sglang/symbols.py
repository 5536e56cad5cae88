"""Looking at the engine's methods: are they as expected, and do they have their hooks?"""

from __future__ import annotations

import inspect
from pkgutil import resolve_name

from nsa_tune.backend.engines.sglang.releases import Symbol

__all__ = ["hooks_on", "mismatch"]

_PACKAGE = __name__.rpartition(".")[0]
_MODULES = ("backend", "prefill", "indexer", "v4_backend", "v4")
_HOOKING = {f"{_PACKAGE}.{name}" for name in _MODULES}


def mismatch(symbol: Symbol) -> str | None:
    """What is wrong with the imported `symbol`, or None when it is as expected."""
    try:
        method = resolve_name(symbol.target)
    except (AttributeError, ImportError, ValueError) as error:
        return f"{symbol.target} is not there: {error}"
    arguments = tuple(inspect.signature(method).parameters)
    if symbol.accepts(arguments):
        return None
    return f"{symbol.target} takes ({', '.join(arguments)})"


def hooks_on(method: object) -> int:
    """How many of the plug-in's hooks run when `method` is called.

    A replacement by another plug-in names what it replaces as wrapped, but does not call it.
    """
    count = 0
    while method is not None:
        held = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
        inner = getattr(method, "__wrapped__", None)
        if not any(one is inner for one in held):
            break
        count += any(_is_hook(one) for one in held if one is not inner)
        method = inner
    return count


def _is_hook(one: object) -> bool:
    # A wrapped method bears the module of the engine's own.
    return getattr(one, "__module__", None) in _HOOKING
