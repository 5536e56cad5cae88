"""Hooking vLLM.

vLLM has no registry of hooks. A builder's class could be replaced by registering another backend,
but only for the models that look theirs up, and an error while that is imported would make vLLM
take the next backend, with another KV layout. So the methods are wrapped in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsa_tune.engines.hooking import Hooking
from nsa_tune.engines.vllm.edge import EDGE
from nsa_tune.engines.vllm.releases import checked, installed_version, release_of


def _hooks() -> Mapping[str, Callable[..., Any]]:
    from nsa_tune.engines.vllm.hook_table import HOOKS

    return HOOKS


_HOOKING = Hooking(EDGE, _hooks)


def install() -> None:
    """Arrange the hooks for the installed vLLM, or say in one line why there are none."""
    version = installed_version()
    release = None if version is None else release_of(version)
    symbols = None if release is None else release.symbols
    _HOOKING.install(version, symbols, checked=checked())
