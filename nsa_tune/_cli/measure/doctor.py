"""The command `doctor`: can this machine measure, and is the plug-in active in an engine?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_tune._cli.shared.console import print_document
from nsa_tune._cli.shared.options import AsJson, Engine
from nsa_tune._errors import MachineUnfit
from nsa_tune.reports.formats.plain import plain

if TYPE_CHECKING:
    from nsa_tune.autotune.health.doctor import Diagnosis


def doctor(
    database: Annotated[
        Path | None,
        typer.Option("--db", help="Database to examine: a file, or an address.", dir_okay=False),
    ] = None,
    engine: Annotated[
        Engine | None,
        typer.Option("--engine", help="Check whether the plug-in is active in this engine."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Examine this machine: GPU, driver, libraries, clocks, other processes and the database.

    Exits with 5 when it cannot measure, or, with --engine, when the plug-in is not active there.
    """
    from nsa_tune.autotune.health.doctor import examine, examine_engine

    diagnosis = examine(database) if engine is None else examine_engine(engine, database)
    if json:
        print_document(_document(diagnosis))
    else:
        for finding in diagnosis.findings:
            typer.echo(plain(f"{finding.state:<5} {finding.subject:<20} {finding.text}"))
        typer.echo(plain(diagnosis.conclusion))
    if not diagnosis.fit:
        raise typer.Exit(MachineUnfit.exit_code)


def _document(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "schema": "nsa-tune/doctor/1",
        "fit": diagnosis.fit,
        "conclusion": diagnosis.conclusion,
        "findings": [asdict(finding) for finding in diagnosis.findings],
    }
