"""Loads the plug-ins as an engine does, imports what they hook, and tells what came of it.

It imports the engine: each engine's folder has a module that does this in a process of its own.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pkgutil import resolve_name

from nsa_tune.engines.edge import Edge
from nsa_tune.engines.symbols import Symbol, hooks_on


class _Kept(logging.Handler):
    """Keeps what was logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line of `record`, its exception's type and text included."""
        error = record.exc_info[1] if record.exc_info else None
        because = f": {type(error).__name__}: {error}" if error else ""
        self.lines.append(f"{record.getMessage()}{because}")


def probe(edge: Edge, load: Callable[[], object], symbols: Iterable[Symbol]) -> dict[str, object]:
    """How many hooks each symbol has after `load`, None where it could not be looked at; and what
    was logged."""
    kept = _Kept()
    logging.getLogger().addHandler(kept)
    load()
    hooks = {one.name: edge.attempt(f"importing {one.target}", _hooks, one) for one in symbols}
    return {"hooks": hooks, "log": kept.lines}


def _hooks(symbol: Symbol) -> int:
    import_module(symbol.module)
    return hooks_on(resolve_name(symbol.target))


def tell(found: dict[str, object]) -> None:
    """Write what was found as the last line of stdout."""
    sys.stdout.write(f"\n{json.dumps(found)}\n")
