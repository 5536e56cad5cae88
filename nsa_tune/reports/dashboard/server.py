"""The web server of the dashboard."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from nsa_tune._errors import NsaTuneError
from nsa_tune.reports.dashboard.access import token_for
from nsa_tune.reports.dashboard.application import application


def serve(
    paths: list[Path],
    *,
    host: str,
    port: int,
    remote: bool,
    token: str | None,
    ready: Callable[[str], None],
) -> None:
    """Serve `paths` on `host` and `port` (0: a free one) until interrupted.

    `ready` is called with the address.

    Raises:
        UsageError: when others could reach `host` and `remote` is false.
        NsaTuneError: when the address cannot be used.
    """
    token = token_for(host, remote=remote, given=token)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise NsaTuneError(
            f"cannot listen on {host}:{port} ({error.strerror}); give another --host or --port"
        ) from error
    with listener:
        name = f"[{host.strip('[]')}]" if ":" in host else host
        address = f"http://{name}:{listener.getsockname()[1]}/"
        ready(address if token is None else f"{address}?token={token}")
        uvicorn.Server(config_of(paths, token)).run(sockets=[listener])


def config_of(paths: list[Path], token: str | None) -> uvicorn.Config:
    """The server's settings for `paths`."""
    return uvicorn.Config(
        application(paths, token=token), log_level="warning", access_log=False,
        server_header=False, lifespan="off", ws="none",
    )  # fmt: skip
