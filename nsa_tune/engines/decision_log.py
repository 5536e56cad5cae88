"""A sample of the decisions that an engine took, to weight a sweep by what really runs.

`NSA_TUNE_LOG=decisions.jsonl` makes the plug-ins write one: a JSON object a line. Each line is a
decision, and stands for `count` of them: itself, and those that went by unwritten since the line
before, because no more than a few lines a second are written.

    schema      "nsa-tune/decision/1"
    time        seconds since 1970, UTC
    pid         the process; the ranks of one engine may share a file
    gpu, model, heads, kv_layout
                the table that was asked; heads are local
    count       decisions that the line stands for
    batch       the batch as a word ("extend:1920+128,0+300x4"), or null where that would be long
    mode, sequences, q_tokens, kv_tokens, max_kv, pairs, next_n, captured
                the batch's features
    own         what the engine would have done, by question; nothing where no table was asked
    taken       what was done

A line is one write to the end of the file, so processes do not mix their lines, and a process
that is killed leaves whole lines. Whatever goes wrong ends the log, with one warning, and never
the engine.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nsa_tune._errors import BatchError, StoreMissing, UsageError
from nsa_tune._files import TooLong, lines_of, open_regular
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

_log = logging.getLogger(__name__)

SCHEMA = "nsa-tune/decision/1"
VARIABLE = "NSA_TUNE_LOG"

_PAUSE_S = 0.5
"""From one line to the next."""
_MOST_BYTES = 256 * 2**20
"""A file of this size is not added to."""
_LONGEST_WORD = 1000
_LONGEST_LINE = 2**16
"""Bytes; `write` makes lines of some 2000."""
_MOST_SEQUENCES, _MOST_COUNT = 2**14, 10**12
"""Of a line that is read: a batch of more sequences, or one that came more often, is made up."""
_FEATURES = {
    "mode": "mode",
    "sequences": "batch_size",
    "q_tokens": "q_tokens",
    "kv_tokens": "kv_tokens",
    "max_kv": "max_kv",
    "pairs": "pairs",
    "next_n": "next_n",
    "captured": "captured",
}
"""Fields of a line, and of a batch."""


class DecisionLog:
    """Appends decisions to a file. One object a process; `due` is cheap, `write` is not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = time.monotonic()
        self._passed = 0
        self._file: int | None = None
        self._ended = False

    @classmethod
    def from_environment(cls) -> DecisionLog | None:
        """The log that NSA_TUNE_LOG asks for, if it does."""
        path = os.environ.get(VARIABLE, "")
        # Path.expanduser raises for a user that is not there.
        return cls(Path(os.path.expanduser(path))) if path else None  # noqa: PTH111

    def due(self) -> int:
        """Count a decision. How many the next line stands for, or 0 while none is due."""
        self._passed += 1
        if self._ended:
            return 0
        now = time.monotonic()
        if now < self._next:
            return 0
        self._next = now + _PAUSE_S
        count, self._passed = self._passed, 0
        return count

    def write(
        self,
        count: int,
        batch: Batch,
        *,
        own: Mapping[str, str | None],
        taken: Mapping[str, str | None],
        table: Mapping[str, object],
    ) -> None:
        """Write the line that `due` has asked for. `table` is as of `table_of`."""
        word = str(batch) if batch.lens is not None else ""
        line = {
            "schema": SCHEMA,
            "time": round(time.time(), 3),
            "pid": os.getpid(),
            **table,
            "count": count,
            "batch": word if 0 < len(word) <= _LONGEST_WORD else None,
            **{name: getattr(batch, field) for name, field in _FEATURES.items()},
            "own": dict(own),
            "taken": dict(taken),
        }
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            file = self._opened()
            if os.fstat(file).st_size + len(data) > _MOST_BYTES:
                self._end(f"it has reached {_MOST_BYTES} bytes")
            elif os.write(file, data) < len(data):
                self._end("a line did not fit on the disk")
        except OSError as error:
            self._end(str(error))

    def _opened(self) -> int:
        if self._file is None:
            # A pipe that nobody reads would hold up the engine, here or when it is full.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = os.open(self._path, flags, 0o644)
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("it is no regular file")
            size = status.st_size
            # A full disk or a lost machine may have left half a line.
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")
        return self._file

    def _end(self, reason: str) -> None:
        self._ended = True
        _log.warning("no more decisions are logged to %s: %s", self._path, reason)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def table_of(setting: Setting) -> dict[str, object]:
    """What `write` says of the table that was asked."""
    return {
        "gpu": setting.device.name,
        "model": setting.profile.name,
        "heads": setting.heads,
        "kv_layout": str(setting.layout),
    }


@cache
def process_log() -> DecisionLog | None:
    """The one log of this process, if NSA_TUNE_LOG asks for it."""
    return DecisionLog.from_environment()


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of a log."""

    time: float
    gpu: str
    model: str
    heads: int
    kv_layout: str
    count: int
    """Decisions that it stands for."""
    batch: Batch
    own: Mapping[str, str | None]
    taken: Mapping[str, str | None]


def read_decisions(path: Path) -> Iterator[Decision]:
    """The decisions in `path`. Lines that cannot be read are left out, with one warning.

    Raises:
        StoreMissing: when the file cannot be opened.
    """
    unreadable = 0
    try:
        with open_regular(path) as file:
            for data in lines_of(file, _LONGEST_LINE):
                line = data.decode("utf-8", "replace")
                decision = _decision(line) if line.strip() else None
                if decision is not None:
                    yield decision
                elif line.strip():
                    unreadable += 1
    except TooLong as error:
        _log.warning("%s: %s: it and all behind it is left out", path, error)
    except OSError as error:
        raise StoreMissing(f"{path} is no readable decision log: {error.strerror}") from error
    if unreadable:
        _log.warning("%s: %d lines are no decisions and were left out", path, unreadable)


def batches_of(path: Path, setting: Setting) -> list[tuple[Batch, float]]:
    """(batch, count) of the decisions in `path` under the GPU, model, heads and KV layout of
    `setting`.

    Raises:
        UsageError: when there are none.
        StoreMissing: when the file cannot be opened.
    """
    wanted = setting.device.name, setting.profile.name, setting.heads, str(setting.layout)
    by_key: dict[tuple[str, str, int, str], list[tuple[Batch, float]]] = {}
    for decision in read_decisions(path):
        key = decision.gpu, decision.model, decision.heads, decision.kv_layout
        by_key.setdefault(key, []).append((decision.batch, decision.count))
    if wanted not in by_key:
        words = "; ".join(", ".join(map(str, key)) for key in sorted(by_key)) or "no decisions"
        raise UsageError(
            f"{path} has no decisions for {', '.join(map(str, wanted))}; it has {words}"
        )
    return by_key[wanted]


def _decision(line: str) -> Decision | None:
    try:
        fields: dict[str, Any] = json.loads(line)
        if fields["schema"] != SCHEMA:
            return None
        word = fields["batch"]
        batch = (
            Batch.parse(word)
            if word is not None
            else Batch.from_totals(**{field: fields[name] for name, field in _FEATURES.items()})
        )
        count = max(int(fields["count"]), 1)
        if batch.batch_size > _MOST_SEQUENCES or count > _MOST_COUNT:
            return None
        return Decision(
            float(fields["time"]), str(fields["gpu"]), str(fields["model"]), int(fields["heads"]),
            str(fields["kv_layout"]), count, batch, dict(fields["own"]), dict(fields["taken"]),
        )  # fmt: skip
    except (ArithmeticError, BatchError, KeyError, RecursionError, TypeError, ValueError):
        return None
