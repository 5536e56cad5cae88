"""The command `dashboard`: the report as a web page, live while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import say
from nsa_tune._errors import ExtraMissing
from nsa_tune.db import places
from nsa_tune.db.connection import check_regular_file


def dashboard(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="Databases and text tables. Default: NSA_TUNE_DB, or the user's database.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")
    ] = 8400,
) -> None:
    """Serve the report as a web page to this machine, live while a run goes on.

    Databases are only read.
    """
    for file in files or ():
        check_regular_file(file)
    try:
        from nsa_tune.reports.dashboard.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ExtraMissing.of("the dashboard", "dashboard") from None
    serve(
        files or [_default()],
        port=port,
        ready=lambda address: say(f"the dashboard is at {address}; Ctrl-C ends it"),
    )


def _default() -> Path:
    """The database that is shown when no file is named. A run may still be going to make it."""
    path = places.default_database()
    if not path.exists():
        say(
            f"{path} does not exist yet: the page lists the tables that ship, and shows it once "
            "`nsa-tune run` makes it"
        )
    return path
