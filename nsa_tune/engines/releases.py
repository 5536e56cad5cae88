"""The releases of an engine that its plug-in knows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from typing import Generic, Protocol, TypeVar

from nsa_tune.engines.symbols import Symbol

Version = tuple[int, ...]


class Release(Protocol):
    """An engine from one version to another."""

    @property
    def first(self) -> Version:
        """The first of its versions, with as many numbers as matter."""
        ...

    @property
    def last(self) -> Version:
        """The last of them."""
        ...

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """What is hooked."""
        ...


R = TypeVar("R", bound=Release)


class KnownReleases(Generic[R]):
    """The known releases of one engine. There are no gaps between them."""

    def __init__(self, distribution: str, releases: Sequence[R]) -> None:
        self.distribution = distribution
        self._releases = releases

    def installed_version(self) -> str | None:
        """The engine's version in this environment."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def release_of(self, version: str) -> R | None:
        """The release that `version` (as the engine's `__version__`) belongs to, if it is known."""
        match = re.match(r"\d+(\.\d+)+", version)
        if match is None:
            return None
        number = tuple(map(int, match[0].split(".")))
        for release in self._releases:
            if release.first <= number[: len(release.first)] <= release.last:
                return release
        return None

    def checked(self) -> str:
        """The known versions, in words."""
        ends = self._releases[0].first, self._releases[-1].last
        return " to ".join(".".join(map(str, version)) for version in ends)
