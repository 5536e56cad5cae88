"""What a host sends back to a service: decision logs, failed checks, and its tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa_tune._errors import StoreError, StoreMissing
from nsa_tune._files import TooLong, lines_of, open_regular
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db.checks import Check
from nsa_tune.db.text_table import format_table
from nsa_tune.remote.client import Client, reading

_PIECE = 2**23
"""Bytes of a log that are sent at once; a service takes 16 MiB."""
_LONGEST_LINE = 2**16


def push_log(service: Client, path: Path) -> int:
    """Send the decision log `path`; how many of its decisions were new to the service.

    It may be sent again when it has grown: its pieces begin at the same lines, so that the service
    knows what it has counted.

    Raises:
        StoreError: when the log cannot be read, or the service does not take it.
    """
    return sum(_posted(service, "/v1/decisions", piece, "decisions") for piece in _pieces(path))


def _pieces(path: Path) -> Iterator[bytes]:
    """Whole lines; the last one may still be growing."""
    piece = bytearray()
    try:
        with open_regular(path) as file:
            for line in lines_of(file, _LONGEST_LINE):
                if len(piece) + len(line) > _PIECE:
                    yield bytes(piece)
                    piece.clear()
                if line.endswith(b"\n"):
                    piece += line
    except FileNotFoundError:
        raise StoreMissing(f"there is no file {path}") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except TooLong as error:
        raise StoreError(f"{path} is no decision log: {error}") from None
    if piece:
        yield bytes(piece)


def findings_of(check: Check, key: Key) -> Iterator[dict[str, Any]]:
    """What a service is told of a failed check of the table of `key`: each batch that moved."""
    for anchor in check.anchors:
        if anchor.problem:
            yield {
                "key": key.as_document(),
                "found_by": "nsa-tune check",
                "checked_at": check.checked_at,
                "driver": check.driver,
                "libraries": dict(check.libraries),
                "drift": check.drift,
                **asdict(anchor),
            }


def push_table(service: Client, table: Table) -> int:
    """Send `table` as text; how many of its measurements were new to the service.

    Raises:
        StoreError: when the service does not take it.
    """
    return _posted(service, "/v1/tables", format_table(table).encode(), "added")


def _posted(service: Client, address: str, body: bytes, name: str) -> int:
    answer = service.post(address, body)
    with reading():
        return int(answer[name])
