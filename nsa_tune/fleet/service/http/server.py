"""The web server of the service."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import uvicorn

from nsa_tune._errors import NsaTuneError
from nsa_tune.fleet.service.http.application import application
from nsa_tune.fleet.service.http.connections import BACKLOG, limited_to, most_connections
from nsa_tune.fleet.service.service import Service

_QUEUED = 1024
"""Connections that the system holds until they are taken."""
_LONGEST_HEAD = 2**14
"""Bytes of a request without its body."""
_LEAVE_S = 10
"""For answers that are under way when the service is told to end."""


def serve(service: Service, *, host: str, port: int, ready: Callable[[str], None]) -> None:
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
            f"cannot listen on {host}:{port} ({error.strerror}); give another --host or --port"
        ) from error
    # As uvicorn, it says nothing of clients that leave: they would fill a log.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with listener:
        shown = f"[{name}]" if ":" in name else name
        ready(f"http://{shown}:{listener.getsockname()[1]}/")
        uvicorn.Server(config_of(service)).run(sockets=[listener])


def config_of(service: Service) -> uvicorn.Config:
    """How `service` is served: within limits that no visitor passes."""
    return uvicorn.Config(
        application(service), http=limited_to(most_connections()), backlog=BACKLOG,
        log_level="error", access_log=False, server_header=False, lifespan="off", ws="none",
        h11_max_incomplete_event_size=_LONGEST_HEAD, timeout_graceful_shutdown=_LEAVE_S,
    )  # fmt: skip
