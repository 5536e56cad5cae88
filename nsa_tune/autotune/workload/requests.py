"""Request traces: when each request arrived, and how many tokens it and its answer had.

Mooncake's JSON lines, Azure's CSV and JSON lines of one's own, by the first line (docs/replay.md).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from nsa_tune._errors import UsageError
from nsa_tune._files import TooLong, lines_of, open_regular

BLOCK = 512
_LONGEST_LINE = 2**22  # bytes; a request of 10 million tokens has 20,000 ids of blocks
_MOST_INPUT, _MOST_OUTPUT = 2**24, 2**20
_MOST_S = 1e11  # seconds from 1970, or from the trace's begin: three thousand years
_NO_REQUEST = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, csv.Error,
)  # fmt: skip
"""What a line that is no request may come to."""
_AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


class TraceRequest(NamedTuple):
    """One request of a trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[Hashable, ...] = ()
    """Ids of the input's blocks of 512 tokens, in order; empty when the trace has none."""


def checked_request(
    arrival_s: float, input_tokens: int, output_tokens: int, blocks: tuple[Hashable, ...] = ()
) -> TraceRequest:
    """The request, as every reader makes it; ValueError when a simulation would not end."""
    if not -_MOST_S <= arrival_s <= _MOST_S:
        raise ValueError(f"a request cannot arrive at {arrival_s} s")
    if max(input_tokens, BLOCK * len(blocks)) > _MOST_INPUT or output_tokens > _MOST_OUTPUT:
        raise ValueError(
            f"a request has at most {_MOST_INPUT} tokens of input and {_MOST_OUTPUT} of output"
        )
    return TraceRequest(arrival_s, input_tokens, output_tokens, blocks)


def read_requests(path: Path) -> list[TraceRequest]:
    """The requests in `path`, by time of arrival. Those without input or output are left out.
    UsageError when the file cannot be read, or a line is not a request."""
    every = list(_opened(path))
    if not every:
        raise UsageError(f"the trace {path} has no request")
    first = min(request.arrival_s for request in every)
    served = (row for row in every if min(row.input_tokens, row.output_tokens) > 0)
    shifted = (row._replace(arrival_s=row.arrival_s - first) for row in served)
    return sorted(shifted, key=lambda request: request.arrival_s)


def _opened(path: Path) -> Iterator[TraceRequest]:
    try:
        with open_regular(path) as file:
            lines = lines_of(file, _LONGEST_LINE)
            first = next(lines, b"").decode("utf-8-sig")
            yield from _requests(path, first, map(bytes.decode, lines))
    except OSError as error:
        raise UsageError(f"the trace {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, TooLong) as error:
        raise UsageError(f"{path} is not a trace: {error}") from error


def _requests(path: Path, first: str, others: Iterable[str]) -> Iterator[TraceRequest]:
    if not first.strip():
        return
    parse: Callable[[str], TraceRequest] = _simple if '"arrival_s"' in first else _mooncake
    if first.strip() == _AZURE:
        parse, first = _azure, ""
    elif not first.lstrip().startswith("{"):
        raise UsageError(
            f"{path} is not a trace that nsa-tune reads: its first line is no JSON object and not "
            f"{_AZURE}"
        )
    for number, line in enumerate(chain([first], others), 1):
        if line.strip():
            try:
                yield parse(line)
            except _NO_REQUEST as error:
                what = f"it has no {error}" if isinstance(error, KeyError) else error
                raise UsageError(
                    f"line {number} of {path} is not a request: {what}; docs/replay.md lists the "
                    "formats of traces"
                ) from error


def _mooncake(line: str) -> TraceRequest:
    fields = json.loads(line)
    blocks = tuple(map(int, fields.get("hash_ids", ())))
    return checked_request(
        float(fields["timestamp"]) / 1e3, int(fields["input_length"]), int(fields["output_length"]),
        blocks,
    )  # fmt: skip


def _simple(line: str) -> TraceRequest:
    fields = json.loads(line)
    shared = fields.get("shared")
    count = 0 if shared is None else int(fields["shared_tokens"]) // BLOCK
    tokens = int(fields["input_tokens"])
    # Checked first: the number of blocks is not to be believed.
    request = checked_request(float(fields["arrival_s"]), tokens, int(fields["output_tokens"]))
    if count * BLOCK > tokens:
        raise ValueError("shared_tokens are more than input_tokens")
    return request._replace(blocks=tuple((str(shared), i) for i in range(count)))


def _azure(line: str) -> TraceRequest:
    (when, asked, answered), *_ = csv.reader([line])
    arrival = datetime.fromisoformat(when)
    if arrival.tzinfo is None:
        # The trace of 2023 names no zone. By local time, hours would be missing or come twice.
        arrival = arrival.replace(tzinfo=UTC)
    return checked_request(arrival.timestamp(), int(asked), int(answered))
