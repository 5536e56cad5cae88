"""A few shared bytes by which the driver tells the probe what to do in the next pass."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

__all__ = ["Control"]

_FIELDS = struct.Struct("<III")
_SIZE = _FIELDS.size


class Control:
    """The bytes: which configuration, a tag for the passes to come, and whether to read memory.

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

    def read(self) -> tuple[int, int, int]:
        """Index of the configuration, tag, and the number of memory readings asked for so far."""
        configuration, tag, readings = _FIELDS.unpack(self._bytes[:_SIZE])
        return configuration, tag, readings

    def write(
        self, *, configuration: int | None = None, tag: int | None = None, readings: int = 0
    ) -> None:
        """Change what is given; `readings` more memory readings are asked for."""
        old = self.read()
        self._bytes[:_SIZE] = _FIELDS.pack(
            old[0] if configuration is None else configuration,
            old[1] if tag is None else tag,
            old[2] + readings,
        )
