"""What engines differ in, as far as loading a plug-in and looking after its hooks goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from nsa_tune.engines.edge import Edge
from nsa_tune.engines.releases import KnownReleases, Release
from nsa_tune.engines.symbols import Symbol


@dataclass(frozen=True, slots=True)
class Plugin:
    """The plug-in for one engine."""

    edge: Edge
    group: str
    """The group of entry points that the engine loads plug-ins from."""
    allow_list: str
    """The environment variable that names the plug-ins that may load."""
    loader: str
    """"module:function" by which the engine loads them."""
    hook_table: str
    """"module:mapping" of the hooks by the name of their symbol. It is imported once a module to
    hook is there: most processes of an engine have none, and need not load what decides."""
    releases: KnownReleases[Any]

    @property
    def engine(self) -> str:
        """The engine's name, as it is written in a sentence."""
        return self.edge.engine

    def hooks(self) -> Mapping[str, Callable[..., Any]]:
        """What is put around a method, by the name of its symbol."""
        hooks: Mapping[str, Callable[..., Any]] = resolve_name(self.hook_table)
        return hooks

    def symbols(self) -> tuple[Symbol, ...] | None:
        """What is hooked in the installed version; None where the plug-in does not know it."""
        release: Release | None = self.releases.installed()
        return None if release is None else release.symbols
