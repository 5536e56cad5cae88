"""Where the commands write: data to stdout, talk to stderr."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from nsa_tune.reports.output.plain import plain

__all__ = ["say", "tables_console"]


def say(text: str) -> None:
    """One line to stderr, without the characters that a terminal obeys."""
    Console(stderr=True, highlight=False).print(Text(plain(text)), soft_wrap=True)


def tables_console() -> Console:
    """The console for tables on stdout: into a file or a pipe they keep their lines whole."""
    return Console() if sys.stdout.isatty() else Console(width=200)
