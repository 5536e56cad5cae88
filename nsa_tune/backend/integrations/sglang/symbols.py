"""Looking at the engine's methods: are they as expected, and do they have their hooks?"""

from __future__ import annotations

import inspect
from pkgutil import resolve_name

from nsa_tune.backend.integrations.sglang.releases import Symbol

__all__ = ["hooks_on", "mismatch"]

_PACKAGE = __name__.rpartition(".")[0]


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
    """How many of the plug-in's hooks are around `method`, as SGLang's registry wraps them."""
    count = 0
    while method is not None:
        held = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
        count += any(getattr(one, "__module__", "").startswith(_PACKAGE) for one in held)
        method = getattr(method, "__wrapped__", None)
    return count
