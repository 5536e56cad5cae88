"""Switching the plug-in, or parts of it, off.

It can be paused within a running engine, so that both ways can be measured in one process. A pass
that has begun is finished as it began. Graphs that were captured with the plug-in stay.
"""

from __future__ import annotations

import os

__all__ = ["pause", "paused", "resume", "switched_on"]

_paused = False


def pause() -> None:
    """From the next pass on SGLang decides everything itself."""
    global _paused
    _paused = True


def resume() -> None:
    """From the next pass on the plug-in decides again."""
    global _paused
    _paused = False


def paused() -> bool:
    """Whether the plug-in is paused."""
    return _paused


def switched_on(name: str) -> bool:
    """Whether the environment variable `name` leaves a part on, as it is by default."""
    return os.environ.get(name, "").strip().lower() not in ("0", "false", "no", "off")
