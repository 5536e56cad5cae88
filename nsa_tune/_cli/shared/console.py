"""Output of the commands: data and JSON documents to stdout, messages to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from nsa_tune.reports.formats.plain import plain


def say(text: str) -> None:
    """Print one line to stderr, without control characters."""
    Console(stderr=True, highlight=False).print(Text(plain(text)), soft_wrap=True)


def print_document(document: Mapping[str, Any]) -> None:
    """Print a document to stdout, as one line of JSON."""
    typer.echo(json.dumps(document, ensure_ascii=False))


def tables_console() -> Console:
    """The console for tables on stdout. In a file or a pipe their lines are not wrapped."""
    return Console() if sys.stdout.isatty() else Console(width=200)
