"""Loads the plug-ins as an engine does, imports what they hook, and tells what came of it.

Run as a process of its own: it imports the engine.

    python -m nsa_tune.engines.probe sglang
"""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module
from pkgutil import resolve_name

from nsa_tune.engines.plugin import Plugin
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


def probe(plugin: Plugin) -> dict[str, object]:
    """How many hooks each symbol has once the engine has loaded its plug-ins, None where it could
    not be looked at; and what was logged."""
    kept = _Kept()
    logging.getLogger().addHandler(kept)
    resolve_name(plugin.loader)()
    hooks = {
        symbol.name: plugin.edge.attempt(f"importing {symbol.target}", _hooks, symbol)
        for symbol in plugin.symbols() or ()
    }
    return {"hooks": hooks, "log": kept.lines}


def _hooks(symbol: Symbol) -> int:
    import_module(symbol.module)
    return hooks_on(resolve_name(symbol.target))


def main(engine: str) -> None:
    """Write what was found of `engine` ("sglang" or "vllm") as the last line of stdout."""
    plugin: Plugin = import_module(f"nsa_tune.engines.{engine}.plugin").PLUGIN
    sys.stdout.write(f"\n{json.dumps(probe(plugin))}\n")


if __name__ == "__main__":
    main(sys.argv[1])
