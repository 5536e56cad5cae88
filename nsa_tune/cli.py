"""The command line.

Each command parses its options, calls one public function and prints the result: data to stdout,
messages and progress to stderr. The commands are in `_cli/`.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import nsa_tune
from nsa_tune._cli.db.group import db
from nsa_tune._cli.fleet.job import job
from nsa_tune._cli.fleet.serve import serve
from nsa_tune._cli.fleet.token import token
from nsa_tune._cli.fleet.worker import worker
from nsa_tune._cli.measure.check import check
from nsa_tune._cli.measure.doctor import doctor
from nsa_tune._cli.measure.probe import probe
from nsa_tune._cli.measure.run import run
from nsa_tune._cli.results.compare import compare
from nsa_tune._cli.results.dashboard import dashboard
from nsa_tune._cli.results.gpus import gpus
from nsa_tune._cli.results.lookup import explain, lookup
from nsa_tune._cli.results.report import report
from nsa_tune._cli.shared.console import UntilClosed, say
from nsa_tune._cli.traffic.advise import advise
from nsa_tune._cli.traffic.options import PricingCommand
from nsa_tune._cli.traffic.replay import replay
from nsa_tune._errors import NsaTuneError

app = typer.Typer(
    help="Measure which attention implementation of a DeepSeek sparse attention model is fastest "
    "for which batch on this GPU, and choose by these measurements.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, commands, groups in (
    ("Tables", (gpus, run, report, dashboard, compare, lookup, explain, check, probe), {"db": db}),
    ("Engine", (advise, replay, doctor), {}),
    ("Fleet", (serve, worker), {"job": job, "token": token}),
):
    for command in commands:
        cls = PricingCommand if command in (advise, replay) else None
        app.command(rich_help_panel=panel, cls=cls)(command)
    for name, group in groups.items():
        app.add_typer(group, name=name, rich_help_panel=panel)


def _let_terminals_wrap(group: typer.Typer) -> None:
    """Make each paragraph of the commands' docstrings one line: Typer keeps a docstring's own."""
    for command in group.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


app.command("tables", hidden=True)(gpus)


for described in (app, db, job, token):
    _let_terminals_wrap(described)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit with its code."""
    logging.basicConfig(format="nsa-tune: %(message)s", stream=sys.stderr)
    sys.stdout = UntilClosed(sys.stdout)
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
