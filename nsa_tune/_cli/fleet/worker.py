"""The command `worker`: measure what a service wants measured."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nsa_tune._cli.fleet.remote import Url, client_of
from nsa_tune._cli.measure.device import check_packages, interruptible
from nsa_tune._cli.measure.progress import progress_for
from nsa_tune._cli.shared.console import say
from nsa_tune._cli.shared.options import Quiet
from nsa_tune._errors import StoreError
from nsa_tune.db import places


def worker(
    url: Url = None,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda, cuda:N, or all GPUs of this host.")
    ] = "auto",
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of this worker in the service. Default: the host's."),
    ] = None,
    busy: Annotated[
        bool, typer.Option("--busy", help="Measure also while others compute on the GPU.")
    ] = False,
    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Ask again when there is no job, or end then."),
    ] = True,
    poll: Annotated[
        float,
        typer.Option("--poll", min=0.1, help="Seconds to wait before asking for a job again."),
    ] = 30.0,
    patience: Annotated[
        float,
        typer.Option(
            "--patience", min=0, help="Seconds to wait for a service that cannot be reached."
        ),
    ] = 600.0,
    database: Annotated[
        Path | None,
        typer.Option(
            "--db",
            help="Where measurements are kept until they are pushed. Default: worker.db in the "
            "user's data directory.",
            dir_okay=False,
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Take jobs from a service, one after the other, measure them here, and push the rows.

    Takes none while other processes compute on the GPU, unless --busy is given. The token, which
    must have the role submit, is read from NSA_TUNE_TOKEN.
    """
    check_packages("measuring")
    from nsa_tune.fleet.worker import WorkerRequest, work

    name = name or socket.gethostname()
    request = WorkerRequest(database or _database(), device, name, busy, wait, poll)
    client = client_of(url, patience)
    progress, shown = progress_for(Console(stderr=True), quiet=quiet)
    with interruptible("interrupted; what was measured is pushed, or kept for later"), shown:
        done = work(client, request, say, progress)
    say(f"{done} {'job' if done == 1 else 'jobs'} done, and there is no other")


def _database() -> Path:
    folder = places.user_folder()
    if folder is None:
        raise StoreError("there is no home directory; give --db")
    return folder / "worker.db"
