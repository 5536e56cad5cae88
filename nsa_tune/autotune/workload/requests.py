"""Request traces: when requests came, and how long they and their answers were.

Two published formats are read, and told apart by their first line:

- Mooncake's JSON lines: `timestamp` (ms), `input_length`, `output_length`, and `hash_ids`, one id
  for every 512 tokens; a shared leading run of ids is a shared prefix.
- Azure's CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; it says nothing of prefixes.
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

__all__ = ["BLOCK", "Request", "read_requests"]

BLOCK = 512
"""Tokens that one of a request's `blocks` stands for."""
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    arrival_s: float
    """Seconds since the trace's first request."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the input's blocks of 512 tokens, in order; none where the trace has none."""


def read_requests(path: Path) -> list[Request]:
    """The requests in `path`, in the order in which they came. Those without a token are left out.

    Raises:
        UsageError: when the file cannot be read, or has a line that is no request.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            found = list(_requests(path, lines))
    except OSError as error:
        raise UsageError(f"the trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the trace {path} is no text: {error}") from error
    if not found:
        raise UsageError(f"the trace {path} has no request")
    first = min(one.arrival_s for one in found)
    shifted = (
        Request(one.arrival_s - first, one.input_tokens, one.output_tokens, one.blocks)
        for one in found
        if one.input_tokens > 0 and one.output_tokens > 0
    )
    return sorted(shifted, key=lambda one: one.arrival_s)


def _requests(path: Path, lines: Iterable[str]) -> Iterator[Request]:
    rows = iter(lines)
    first = next(rows, "")
    names = tuple(first.strip().split(","))
    if names == _AZURE:
        parse: Callable[[str], Request] = _azure
    elif first.lstrip().startswith("{"):
        parse, rows = _mooncake, iter([first, *rows])
    else:
        raise UsageError(
            f"{path} is no trace that nsa-tune reads: its first line is neither a JSON object nor "
            f"{','.join(_AZURE)}"
        )
    start = 2 if parse is _azure else 1
    for number, line in enumerate(rows, start):
        if line.strip():
            try:
                yield parse(line)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise UsageError(f"line {number} of {path} is no request: {error!r}") from error


def _mooncake(line: str) -> Request:
    found: dict[str, Any] = json.loads(line)
    blocks = tuple(map(int, found.get("hash_ids", ())))
    return Request(
        float(found["timestamp"]) / 1e3, int(found["input_length"]), int(found["output_length"]),
        blocks,
    )  # fmt: skip


def _azure(line: str) -> Request:
    (when, asked, answered), *_ = csv.reader([line])
    # Seven digits of a second, which Python before 3.11 does not read.
    arrival = datetime.fromisoformat(when[:26]).timestamp()
    return Request(arrival, int(asked), int(answered))
