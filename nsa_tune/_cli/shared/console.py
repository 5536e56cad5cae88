"""Output of the commands: data and JSON documents to stdout, messages to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.text import Text

from nsa_tune.reports.formats.plain import plain


class UntilClosed:
    """A text stream whose reader may go away, as `| head` does: what comes later goes nowhere, and
    the command ends as if it had been read."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text` as long as somebody reads."""
        with self._until_closed():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered as long as somebody reads."""
        with self._until_closed():
            self._stream.flush()

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def say(text: str) -> None:
    """Print one line to stderr, without control characters."""
    Console(stderr=True, highlight=False).print(Text(plain(text)), soft_wrap=True)


def print_document(document: Mapping[str, Any]) -> None:
    """Print a document to stdout, as one line of JSON."""
    typer.echo(json.dumps(document, ensure_ascii=False))


def tables_console() -> Console:
    """The console for tables on stdout. In a file or a pipe their lines are not wrapped."""
    return Console() if sys.stdout.isatty() else Console(width=200)
