"""Compiled policies, kept in a file beside the database that they were made from.

A process that finds one need not read and compile the measurements again. It is found by the
request and used only if the database still has the very bytes that it was made from, the code is
the same, and the file is whole and belongs to the user or to the database's owner; otherwise it
is ignored, and written anew. Where nothing can be written there is none. It never holds a limit:
guards are code.

The file has three lines: its format with a digest of the rest, what decisions need, and the
measurements, which are only parsed when somebody asks for reasons. Both are JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import nan
from operator import attrgetter
from pathlib import Path
from typing import Any

from nsa_tune.backend.costmodel.compiling import Compiled, Extent
from nsa_tune.backend.costmodel.model import Box, CostModel, Failures
from nsa_tune.backend.types.records import Device, Key, Measurement, Table
from nsa_tune.db.text_table import checked_measurements

__all__ = ["Entry", "content_of", "file_of", "load", "store"]

_log = logging.getLogger(__name__)

_FORMAT = "nsa-tune-compiled 2"
_CODE = (
    "points", "batch", "compiling", "costs", "guards", "judging", "layouts", "least_squares",
    "lengths", "newest", "point", "policy_cache", "profiles", "records", "tables", "text_table",
)  # fmt: skip
"""The modules that decide what is compiled."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled table."""

    key: Key
    device: Device
    source: str
    measured_at: str
    limits: Mapping[str, int]
    compiled: Mapping[str, Compiled]
    """By point."""
    rows: str
    """The measurements, packed."""

    def measurements(self) -> tuple[Measurement, ...]:
        """The measurements, parsed."""
        return checked_measurements(_unpacked(self.rows))

    def table(self) -> Table:
        """The table as it was read."""
        return Table(
            self.key, self.device, self.measurements(), self.source, self.measured_at, self.limits
        )


def content_of(database: Path) -> str | None:
    """A digest of what is in `database` and in its log, or None where that cannot be read."""
    digest = hashlib.sha256()
    try:
        for path in (database, database.with_name(f"{database.name}-wal")):
            if path == database or path.exists():
                digest.update(path.read_bytes())
    except OSError:
        return None
    return digest.hexdigest()


def file_of(database: Path, request: Sequence[object]) -> Path:
    """Where the answer to `request` is kept: one file for each, whatever the database's content."""
    digest = hashlib.sha256(json.dumps([str(one) for one in request]).encode())
    return database.with_name(f"{database.name}.{digest.hexdigest()[:16]}.compiled")


def load(file: Path, database: Path, content: str) -> Entry | None:
    """What `file` holds, if it was made from this `content` by this code and is whole."""
    try:
        if file.stat().st_uid not in (os.getuid(), database.stat().st_uid):
            return None
        head, _, body = file.read_bytes().partition(b"\n")
        if head.decode() != f"{_FORMAT} {hashlib.sha256(body).hexdigest()}":
            return None
        facts, rows, _ = body.decode().split("\n")
        found = json.loads(facts)
        if found["content"] != content or found["code"] != _code():
            return None
        return _entry(found, rows)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.debug("%s is ignored: %s", file, error)
        return None


def store(file: Path, content: str, table: Table, compiled: Mapping[str, Compiled]) -> None:
    """Write `file` for the next process, if that is possible."""
    temporary = None
    try:
        facts = {
            "content": content,
            "code": _code(),
            "key": asdict(table.key),
            "device": asdict(table.device),
            "source": table.source,
            "measured_at": table.measured_at,
            "limits": dict(table.limits),
            "points": {name: _plain(one) for name, one in compiled.items()},
        }
        body = f"{json.dumps(facts)}\n{_packed(table.measurements)}\n".encode()
        head = f"{_FORMAT} {hashlib.sha256(body).hexdigest()}\n".encode()
        handle, temporary = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(head + body)
        os.replace(temporary, file)  # noqa: PTH105
    except OSError as error:
        _log.debug("%s is not written: %s", file, error)
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108


def _code() -> str:
    """Which code compiles here: names, sizes and times of its files."""
    names = tuple(f"{__package__}.{name}" for name in _CODE)
    facts = []
    for name, module in sorted(sys.modules.items()):
        if name in names or name.startswith(f"{names[0]}."):
            path = getattr(module, "__file__", None)
            status = os.stat(path) if path else None  # noqa: PTH116
            facts.append((name, status and (status.st_size, status.st_mtime_ns)))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


# --- measurements as text


def _packed(measurements: Sequence[Measurement]) -> str:
    """Measurements as JSON, column by column, each as one text: of 5,000 of them that takes an
    eighth of the time that 55,000 values take."""
    return json.dumps(
        [_PACKS[name][0](list(map(attrgetter(name), measurements))) for name in _PACKS]
    )


def _unpacked(text: str) -> list[Sequence[object]]:
    columns = json.loads(text)
    return [read(column) for (_, read), column in zip(_PACKS.values(), columns, strict=True)]


def _joined(texts: Sequence[str]) -> str | list[str]:
    joined = "\n".join(texts)
    return joined if joined.count("\n") == len(texts) - 1 else [*texts]


def _split(column: str | list[str]) -> list[str]:
    return column.split("\n") if isinstance(column, str) else column


def _digits(kind: str, numbers: Sequence[float | None]) -> str:
    known = [nan if number is None else number for number in numbers]
    return struct.pack(f"<{len(known)}{kind}", *known).hex()


def _numbers(kind: str, digits: str) -> list[float | None]:
    found = bytes.fromhex(digits)
    numbers = struct.unpack(f"<{len(found) // 8}{kind}", found)
    return [None if number != number else number for number in numbers]


_TEXT = (_joined, _split)
_FLOAT, _WHOLE = ((partial(_digits, kind), partial(_numbers, kind)) for kind in "dq")
_PACKS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Sequence[object]]]] = {
    "point": _TEXT,
    "batch": _TEXT,
    "arm": _TEXT,
    "status": _TEXT,
    "latency_us": _FLOAT,
    "low_us": _FLOAT,
    "high_us": _FLOAT,
    "samples": _WHOLE,
    "error": _FLOAT,
    "reason": _TEXT,
    "discarded": _WHOLE,
}
"""How each field of a measurement is written, and read again."""


# --- compiled policies as plain values


def _plain(compiled: Compiled) -> dict[str, Any]:
    return {
        "models": {
            arm: {str(sheet): model.weights for sheet, model in models.items()}
            for arm, models in compiled.models.items()
        },
        "failures": {
            arm: [one.wrong, {str(sheet): boxes for sheet, boxes in one.boxes.items()}]
            for arm, one in compiled.failures.items()
        },
        "by_surfaces": sorted(compiled.by_surfaces),
        "extent": compiled.extent,
    }


def _entry(found: Mapping[str, Any], rows: str) -> Entry:
    key = dict(found["key"])
    key["libraries"] = tuple((name, version) for name, version in key["libraries"])
    return Entry(
        Key(**key),
        Device(**found["device"]),
        found["source"],
        found["measured_at"],
        {str(name): int(value) for name, value in found["limits"].items()},
        {name: _compiled(one) for name, one in found["points"].items()},
        rows,
    )


def _compiled(plain: Mapping[str, Any]) -> Compiled:
    return Compiled(
        models={
            arm: {
                int(sheet): CostModel(tuple(map(float, weights)))
                for sheet, weights in models.items()
            }
            for arm, models in plain["models"].items()
        },
        failures={
            arm: Failures(wrong, {int(sheet): _boxes(some) for sheet, some in boxes.items()})
            for arm, (wrong, boxes) in plain["failures"].items()
        },
        by_surfaces=frozenset(map(int, plain["by_surfaces"])),
        extent=plain["extent"] and Extent(*plain["extent"]),
    )


def _boxes(plain: Iterable[Any]) -> tuple[Box, ...]:
    return tuple(Box(tuple(low), tuple(high), reason) for low, high, reason in plain)
