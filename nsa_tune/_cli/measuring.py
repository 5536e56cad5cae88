"""What the commands that use this machine's device share: options, Ctrl-C, missing packages."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import say
from nsa_tune._cli.shared.options import Heads, KvDtype, Model
from nsa_tune._errors import ExtraMissing, UsageError

__all__ = ["INTERRUPTED", "ModelOptions", "Quiet", "check_packages", "interruptible", "names_of"]

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options that say which model's attention layer is measured."""

    model: Model = None
    heads: Heads = None
    kv_dtype: Annotated[KvDtype, typer.Option("--kv-dtype", help="Format of the KV pool.")] = (
        KvDtype.FP8
    )


def check_packages(purpose: str) -> None:
    """Make sure that the packages for measuring are installed, without loading them.

    Raises:
        ExtraMissing: when one is not; it says that `purpose` needs it, and how to install it.
    """
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise ExtraMissing.of(purpose, "tune")


def names_of(option: str, text: str) -> tuple[str, ...]:
    """The comma-separated names in `text`; none for "all".

    Raises:
        UsageError: when a name is empty.
    """
    if text == "all":
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(f"{option} {text!r} lacks a name; write names separated by commas")
    return names


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
