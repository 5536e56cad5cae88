"""Keep of a CUDA library what one GPU needs: device code of one architecture, of some sources.

The library keeps its length, its headers and its host code; device code that is left out becomes a
hole, and so do symbols that only a debugger reads. CUDA loads a kernel when it is first launched,
so a hole matters only to kernels in it.

A fat binary, in the ELF sections .nv_fatbin and __nv_relfatbin, is a row of containers: a header
with a magic number and two lengths, then entries, each with a header of its own that names an
architecture.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

__all__ = ["SUFFIX", "restore", "shrink"]

SUFFIX = ".sparse"
"""Of a file that holds what is left of a library."""

_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
"""Magic, version, header length, length of the entries."""
_ENTRY = struct.Struct("<HHIQ")
"""Kind, flags, header length, length of the code."""
_ARCH_AT = 28
"""Where in an entry's header its architecture is, such as 90."""
_SECTION = struct.Struct("<IIQQQQ")
"""Name, kind, flags, address, offset in the file, length."""
_NULL, _NO_BYTES, _ALLOCATED = 0, 8, 2
_FAT_BINARIES = (".nv_fatbin", "__nv_relfatbin")
_ZSTD = b"\x28\xb5\x2f\xfd"
_SOURCE = re.compile(rb"_INTERNAL_[0-9a-f]{8}_(\d+)_")
"""nvcc writes the length of the source's name, then the name, into internal symbols."""

Range = tuple[int, int]
"""Offset and length."""


def shrink(source: Path, target: Path, arch: int, keep: str | None = None) -> int:
    """Write what is left of the library `source` to `target`; the bytes that were left out.

    Device code stays when it is for `arch` (90 for sm_90) and, where `keep` is given, when this
    regular expression is found in the name of the source that it was compiled from.
    """
    wanted = re.compile(keep) if keep else None
    with source.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        ranges, at = [], 0
        for start, length in sorted(_left_out(view, arch, wanted)):
            if start > at:
                ranges.append((at, start - at))
            at = max(at, start + length)
        ranges.append((at, len(view) - at))
        with target.open("wb") as out:
            out.write(json.dumps({"size": len(view), "ranges": ranges}).encode() + b"\n")
            for start, length in ranges:
                out.write(view[start : start + length])
        return len(view) - sum(length for _, length in ranges)


def restore(source: BinaryIO, target: Path) -> None:
    """Write the library whose rest `source` holds to `target`, with holes."""
    head = json.loads(source.readline())
    with target.open("wb") as out:
        out.truncate(head["size"])
        for offset, length in head["ranges"]:
            out.seek(offset)
            out.write(source.read(length))
    target.chmod(0o755)


def _left_out(view: mmap.mmap, arch: int, wanted: re.Pattern[str] | None) -> Iterator[Range]:
    for name, loaded, offset, size in _sections(view):
        if not loaded and name != ".shstrtab":
            yield offset, size
        if name not in _FAT_BINARIES:
            continue
        for entry_arch, start, length in _entries(view, offset, offset + size):
            stays = entry_arch == arch
            if stays and wanted is not None:
                source = _source_of(view[start : start + length])
                # Code without a name is shared by others.
                stays = not source or wanted.search(source) is not None
            if not stays:
                yield start, length


def _entries(view: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(architecture, offset, length) of each piece of device code between two offsets."""
    while at < end - _CONTAINER.size:
        magic, _, header, length = _CONTAINER.unpack_from(view, at)
        if magic != _MAGIC:
            at += 8  # Padding.
            continue
        entry, at = at + header, at + header + length
        while entry < at:
            _, _, entry_header, entry_length = _ENTRY.unpack_from(view, entry)
            (arch,) = struct.unpack_from("<I", view, entry + _ARCH_AT)
            yield arch, entry + entry_header, entry_length
            entry += entry_header + entry_length


def _sections(view: mmap.mmap) -> Iterator[tuple[str, bool, int, int]]:
    """(name, whether a program loads it, offset, length) of an ELF file's sections in the file."""
    if view[:5] != b"\x7fELF\x02":
        raise ValueError("this is no 64-bit ELF file")
    (headers,) = struct.unpack_from("<Q", view, 0x28)
    each, count, names_index = struct.unpack_from("<HHH", view, 0x3A)
    sections = [_SECTION.unpack_from(view, headers + i * each) for i in range(count)]
    names = sections[names_index][4]
    for name_at, kind, flags, _, offset, size in sections:
        if kind not in (_NULL, _NO_BYTES):
            name = view[names + name_at : view.find(b"\0", names + name_at)].decode()
            yield name, bool(flags & _ALLOCATED), offset, size


def _source_of(code: bytes) -> str:
    """The .cu file that device code was compiled from; "" where it does not say."""
    if code.startswith(_ZSTD):
        try:
            zstandard = import_module("zstandard")
        except ImportError as error:
            raise ImportError("device code is compressed: pip install zstandard") from error
        code = zstandard.ZstdDecompressor().decompressobj().decompress(code)
    found = _SOURCE.search(code)
    return code[found.end() : found.end() + int(found[1])].decode() if found else ""
