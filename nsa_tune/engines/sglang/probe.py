"""Loads the plug-ins as SGLang does, imports what they hook, and tells what came of it.

Run as a process of its own: it imports the engine.

    python -m nsa_tune.engines.sglang.probe
"""

from __future__ import annotations

from importlib import import_module

from nsa_tune.engines.probe import probe, tell
from nsa_tune.engines.sglang.edge import EDGE
from nsa_tune.engines.sglang.releases import installed_version, release_of


def main() -> None:
    """Write the finding as the last line of stdout."""
    release = release_of(installed_version() or "")
    tell(probe(EDGE, _load, () if release is None else release.symbols))


def _load() -> None:
    import_module("sglang.srt.plugins").load_plugins()


if __name__ == "__main__":
    main()
