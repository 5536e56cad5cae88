"""A few shared bytes by which the driver tells the probe what to do in the next pass."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

__all__ = ["Control", "Wanted"]

_FIELDS = struct.Struct("<IIIIII")
_SIZE = _FIELDS.size


class Wanted(NamedTuple):
    """What the driver wants of the next pass."""

    configuration: int
    """Its index."""
    tag: int
    readings: int
    """How often memory was to be read so far."""
    keeps: bool
    """Whether prefills write their outputs to files."""
    profiles: int
    """Whether prefills are profiled: not at all (0), the GPU's kernels (1), or Python (2)."""
    by_content: bool
    """Whether indexers select keys wherever they stand."""


class Control:
    """The bytes: a configuration, a tag for the passes to come, and what else to note of them.

    Write only while the engine is idle: several processes read it, each before its next pass.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), _SIZE)

    @classmethod
    def create(cls, path: Path) -> Control:
        """A new file at `path`."""
        path.write_bytes(bytes(_SIZE))
        return cls(path)

    def read(self) -> Wanted:
        """What is wanted now."""
        configuration, tag, readings, keeps, *rest = _FIELDS.unpack(self._bytes[:_SIZE])
        return Wanted(configuration, tag, readings, bool(keeps), rest[0], bool(rest[1]))

    def write(
        self, *, configuration: int | None = None, tag: int | None = None, readings: int = 0,
        keeps: bool | None = None, profiles: int | None = None, by_content: bool | None = None,
    ) -> None:  # fmt: skip
        """Change what is given; `readings` more memory readings are asked for."""
        old = self.read()
        self._bytes[:_SIZE] = _FIELDS.pack(
            old.configuration if configuration is None else configuration,
            old.tag if tag is None else tag,
            old.readings + readings,
            old.keeps if keeps is None else keeps,
            old.profiles if profiles is None else profiles,
            old.by_content if by_content is None else by_content,
        )
