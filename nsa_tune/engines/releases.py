"""The releases of an engine that its plug-in knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Generic, TypeVar

from nsa_tune.engines.symbols import Symbol, in_source

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """An engine from one version to another, both included."""

    first: Version
    """With as many numbers as matter."""
    last: Version
    symbols: tuple[Symbol, ...]
    """What is hooked."""


R = TypeVar("R", bound=Release)


class KnownReleases(Generic[R]):
    """The known releases of one engine. There are no gaps between them."""

    def __init__(
        self,
        distribution: str,
        releases: Sequence[R],
        newer: Callable[[R, Version], R] | None = None,
    ) -> None:
        """`newer` makes a release of a version behind all known ones, from the last of them."""
        self.distribution = distribution
        self._releases = releases
        self._newer = newer
        self._unknown: dict[str, R | None] = {}

    def installed_version(self) -> str | None:
        """The engine's version in this environment."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def installed(self) -> R | None:
        """The release that is hooked here, if any.

        That may be one newer than all known, if its source has everything that is hooked in the
        last known one.
        """
        version = self.installed_version() or ""
        release = self.release_of(version)
        if release is None and version not in self._unknown:
            self._unknown[version] = self._unproven(version)
        return release or self._unknown[version]

    def _unproven(self, version: str) -> R | None:
        number, last = _number(version), self._releases[-1]
        if self._newer is None or number is None or number[: len(last.last)] <= last.last:
            return None
        release = self._newer(last, number)
        there = (in_source(self.distribution, symbol)[0] for symbol in release.symbols)
        return release if all(there) else None

    def release_of(self, version: str) -> R | None:
        """The release that `version` (as the engine's `__version__`) belongs to, if it is known."""
        number = _number(version)
        if number is None:
            return None
        for release in self._releases:
            if release.first <= number[: len(release.first)] <= release.last:
                return release
        return None

    def checked(self) -> str:
        """The known versions, in words."""
        ends = self._releases[0].first, self._releases[-1].last
        return " to ".join(".".join(map(str, version)) for version in ends)


def _number(version: str) -> Version | None:
    match = re.match(r"\d+(\.\d+)+", version)
    return None if match is None else tuple(map(int, match[0].split(".")))
