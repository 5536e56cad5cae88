"""Packages that a test makes up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def only_here(*packages: str) -> Iterator[None]:
    """What is imported of `packages` inside is forgotten afterwards; what was there comes back."""
    before = _taken(packages)
    try:
        yield
    finally:
        _taken(packages)
        sys.modules.update(before)


def _taken(packages: tuple[str, ...]) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}
