"""Request traces: when each request arrived, and how many tokens it and its answer had.

Two published formats are read. The first line of a file tells which it is:

- Mooncake's JSON lines: `timestamp` (ms), `input_length`, `output_length`, and `hash_ids`, one id
  for every 512 tokens. Requests whose first ids are the same share that prefix.
- Azure's CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; without prefixes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nsa_tune._errors import UsageError

__all__ = ["BLOCK", "TraceRequest", "read_requests"]

BLOCK = 512
"""Tokens of a block."""
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Seconds since the trace's first request."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the input's blocks of 512 tokens, in order; empty when the trace has none."""


def read_requests(path: Path) -> list[TraceRequest]:
    """The requests in `path`, by time of arrival. Those without input or output are left out.

    Raises:
        UsageError: when the file cannot be read, or a line is not a request.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            found = list(_requests(path, lines))
    except OSError as error:
        raise UsageError(f"the trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the trace {path} is not text: {error}") from error
    if not found:
        raise UsageError(f"the trace {path} has no request")
    first = min(one.arrival_s for one in found)
    shifted = (
        TraceRequest(one.arrival_s - first, one.input_tokens, one.output_tokens, one.blocks)
        for one in found
        if one.input_tokens > 0 and one.output_tokens > 0
    )
    return sorted(shifted, key=lambda one: one.arrival_s)


def _requests(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    rows = iter(lines)
    first = next(rows, "")
    names = tuple(first.strip().split(","))
    if names == _AZURE:
        parse: Callable[[str], TraceRequest] = _azure
    elif first.lstrip().startswith("{"):
        parse, rows = _mooncake, iter([first, *rows])
    else:
        raise UsageError(
            f"{path} is not a trace that nsa-tune reads: its first line is no JSON object and not "
            f"{','.join(_AZURE)}"
        )
    start = 2 if parse is _azure else 1
    for number, line in enumerate(rows, start):
        if line.strip():
            try:
                yield parse(line)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise UsageError(f"line {number} of {path} is not a request: {error!r}") from error


def _mooncake(line: str) -> TraceRequest:
    found: dict[str, Any] = json.loads(line)
    blocks = tuple(map(int, found.get("hash_ids", ())))
    return TraceRequest(
        float(found["timestamp"]) / 1e3, int(found["input_length"]), int(found["output_length"]),
        blocks,
    )  # fmt: skip


def _azure(line: str) -> TraceRequest:
    (when, asked, answered), *_ = csv.reader([line])
    # Seconds have seven digits there; a datetime holds six.
    arrival = datetime.fromisoformat(when[:26]).timestamp()
    return TraceRequest(arrival, int(asked), int(answered))
