"""The web server of the dashboard, for this machine alone."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from nsa_tune._errors import NsaTuneError
from nsa_tune.reports.dashboard.application import application

_HOST = "127.0.0.1"


def serve(paths: list[Path], *, port: int, ready: Callable[[str], None]) -> None:
    """Serve `paths` on `port` (0: a free one) until interrupted.

    `ready` is called with the address.

    Raises:
        NsaTuneError: when the port cannot be used.
    """
    try:
        listener = socket.create_server((_HOST, port))
    except OSError as error:
        raise NsaTuneError(
            f"cannot listen on {_HOST}:{port} ({error.strerror}); give another --port"
        ) from error
    with listener:
        ready(f"http://{_HOST}:{listener.getsockname()[1]}/")
        uvicorn.Server(config_of(paths)).run(sockets=[listener])


def config_of(paths: list[Path]) -> uvicorn.Config:
    """The server's settings for `paths`."""
    return uvicorn.Config(
        application(paths), log_level="warning", access_log=False,
        server_header=False, lifespan="off", ws="none",
    )  # fmt: skip
