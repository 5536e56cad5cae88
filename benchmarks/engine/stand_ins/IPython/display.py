"""Stand-in: the two names that SGLang imports."""

from __future__ import annotations


class HTML:
    """Holds nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...


def display(*_: object, **__: object) -> None:
    """Show nothing."""
