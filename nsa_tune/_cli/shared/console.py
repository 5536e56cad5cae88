"""Output of the commands: data to stdout, messages to stderr."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from nsa_tune.reports.formats.plain import plain

__all__ = ["say", "tables_console"]


def say(text: str) -> None:
    """Print one line to stderr, without control characters."""
    Console(stderr=True, highlight=False).print(Text(plain(text)), soft_wrap=True)


def tables_console() -> Console:
    """The console for tables on stdout. In a file or a pipe their lines are not wrapped."""
    return Console() if sys.stdout.isatty() else Console(width=200)
