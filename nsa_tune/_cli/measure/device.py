"""What the commands that use this machine's device share: Ctrl-C, missing packages."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from nsa_tune._cli.shared.console import say
from nsa_tune._errors import ExtraMissing

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""


def check_packages(purpose: str) -> None:
    """Make sure that the packages for measuring are installed, without loading them.

    Raises:
        ExtraMissing: when one is not; it says that `purpose` needs it, and how to install it.
    """
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise ExtraMissing.of(purpose, "tune")


@contextmanager
def interruptible(sentence: str) -> Iterator[None]:
    """End the command with exit code 130 on Ctrl-C, after `sentence` on stderr.

    SIGTERM, which a batch system sends before it kills a job, has the same effect.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        say(f"nsa-tune: {sentence}")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
