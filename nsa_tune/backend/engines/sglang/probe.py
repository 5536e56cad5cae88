"""Loads the plug-ins as SGLang does, imports what they hook, and tells what came of it.

Run as a process of its own: it imports the engine.

    python -m nsa_tune.backend.engines.sglang.probe
"""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module
from pkgutil import resolve_name

from nsa_tune.backend.engines.sglang.edge import attempt
from nsa_tune.backend.engines.sglang.releases import installed_version, release_of
from nsa_tune.backend.engines.symbols import Symbol, hooks_on

__all__ = ["main", "probe"]


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


def probe() -> dict[str, object]:
    """How many hooks each symbol has, None where it could not be looked at; and what was logged."""
    kept = _Kept()
    logging.getLogger().addHandler(kept)
    release = release_of(installed_version() or "")
    symbols = () if release is None else release.symbols
    import_module("sglang.srt.plugins").load_plugins()
    hooks = {one.name: attempt(f"importing {one.target}", _hooks, one) for one in symbols}
    return {"hooks": hooks, "log": kept.lines}


def _hooks(symbol: Symbol) -> int:
    import_module(symbol.module)
    return hooks_on(resolve_name(symbol.target))


def main() -> None:
    """Write the finding as the last line of stdout."""
    sys.stdout.write(f"\n{json.dumps(probe())}\n")


if __name__ == "__main__":
    main()
