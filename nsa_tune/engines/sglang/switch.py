"""Pausing the plug-in.

It can be paused within a running engine, so that both ways can be measured in one process. A pass
that has begun is finished as it began. Graphs that were captured with the plug-in stay.
"""

from __future__ import annotations

_paused = False


def pause() -> None:
    """From the next pass on SGLang decides everything itself.

    Of an engine with several ranks pause each of them while it is idle, and resume so too: two
    ranks that run one pass in different ways may wait for each other.
    """
    global _paused
    _paused = True


def resume() -> None:
    """From the next pass on the plug-in decides again."""
    global _paused
    _paused = False


def paused() -> bool:
    """Whether the plug-in is paused."""
    return _paused
