"""Hooking SGLang.

SGLang's registry would import a hook's target at once, and applies what is registered for a target
anew when it is entered while it applies hooks: importing a module is such a moment, for another
plug-in may have a hook in the same module. So the methods are wrapped without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsa_tune.engines.hooking import Hooking
from nsa_tune.engines.sglang.edge import EDGE
from nsa_tune.engines.sglang.releases import checked, installed_version, release_of


def _hooks() -> Mapping[str, Callable[..., Any]]:
    from nsa_tune.engines.sglang.hook_table import HOOKS

    return HOOKS


_HOOKING = Hooking(EDGE, _hooks)


def install() -> None:
    """Arrange the hooks for the installed SGLang, or say in one line why there are none."""
    version = installed_version()
    release = None if version is None else release_of(version)
    symbols = None if release is None else release.symbols
    _HOOKING.install(version, symbols, checked=checked())
