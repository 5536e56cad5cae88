"""The command line. Each command parses, calls one public function and prints what it returns.

Data goes to stdout, talk and progress to stderr. The commands are in `_cli/`, by what they are for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import nsa_tune
from nsa_tune._cli import (
    advising,
    asking,
    comparing,
    measuring,
    probing,
    reporting,
    serving,
)
from nsa_tune._cli.console import say
from nsa_tune._cli.databases import db
from nsa_tune._errors import NsaTuneError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Measure which attention implementation of a DeepSeek sparse attention model is fastest "
    "for which batch on this GPU, and answer from the measurements.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    measuring.run,
    probing.probe,
    asking.lookup,
    asking.explain,
    reporting.report,
    advising.advise,
    comparing.compare,
    serving.dashboard,
    measuring.doctor,
):
    app.command()(command)
app.add_typer(db, name="db")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    logging.basicConfig(format="nsa-tune: %(message)s", stream=sys.stderr)
    try:
        app(arguments, prog_name="nsa-tune")
    except NsaTuneError as error:
        say(f"nsa-tune: {error}")
        sys.exit(error.exit_code)


def _version(wanted: bool) -> None:
    if wanted:
        print(nsa_tune.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    del version  # its callback has printed it


if __name__ == "__main__":
    main()
