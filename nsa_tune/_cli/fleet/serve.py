"""The command `serve`: tables, jobs and the dashboard over HTTP, for many hosts."""

from __future__ import annotations

import signal
from contextlib import closing
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import say
from nsa_tune._cli.shared.options import DatabaseToWrite
from nsa_tune._errors import ExtraMissing
from nsa_tune.db import places


def serve(
    database: DatabaseToWrite = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")
    ] = 8401,
    auto_approve: Annotated[
        bool,
        typer.Option(
            "--auto-approve", help="Queue proposed jobs at once, instead of waiting for an admin."
        ),
    ] = False,
    lease: Annotated[
        float,
        typer.Option(
            "--lease",
            min=1,
            help="Seconds that a worker may be silent before its job goes to another.",
        ),
    ] = 120.0,
) -> None:
    """Serve tables to many hosts; workers take jobs from here and push what they measure."""
    try:
        from nsa_tune.fleet.service.http.server import serve as run_service
        from nsa_tune.fleet.service.service import Service
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise ExtraMissing.of("the service", "serve") from None
    path = database or places.database_to_write()

    def ready(address: str) -> None:
        say(
            f"the service is at {address}, with the tables of {path}; `nsa-tune token add` makes "
            "tokens for it; Ctrl-C ends it"
        )

    # uvicorn finishes what is under way, and then hands the signal on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with closing(Service(path, auto_approve=auto_approve, lease_s=lease)) as service:
            run_service(service, host=host, port=port, ready=ready)
    except KeyboardInterrupt:
        say("the service has ended")
