"""The web server of the dashboard, for this machine alone."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from nsa_tune._errors import NsaTuneError
from nsa_tune.reports.dashboard.application import application

_QUEUED = 1024
"""Connections that the system holds until they are taken."""


def serve(paths: list[Path], *, port: int, ready: Callable[[str], None]) -> None:
    """Serve `paths` as `run` does."""
    run(config_of(paths), host="127.0.0.1", port=port, ready=ready)


def config_of(paths: list[Path]) -> uvicorn.Config:
    return uvicorn.Config(
        application(paths), log_level="warning", access_log=False,
        server_header=False, lifespan="off", ws="none",
    )  # fmt: skip


def run(config: uvicorn.Config, *, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve on `host` and `port` (0: a free one) until interrupted. `ready` gets the address.

    Raises:
        NsaTuneError: when the address cannot be used.
    """
    name = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        listener = socket.create_server((name, port), family=family, backlog=_QUEUED)
    except OSError as error:
        raise NsaTuneError(
            f"cannot listen on {host}:{port} ({error.strerror}); give another address"
        ) from error
    with listener:
        shown = f"[{name}]" if ":" in name else name
        ready(f"http://{shown}:{listener.getsockname()[1]}/")
        uvicorn.Server(config).run(sockets=[listener])
