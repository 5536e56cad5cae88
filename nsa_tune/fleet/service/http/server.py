"""The web server of the service."""

from __future__ import annotations

import logging
from collections.abc import Callable

import uvicorn

from nsa_tune.fleet.service.http.application import application
from nsa_tune.fleet.service.http.connections import BACKLOG, limited_to, most_connections
from nsa_tune.fleet.service.service import Service
from nsa_tune.reports.dashboard.server import run

_LONGEST_HEAD = 2**14
"""Bytes of a request without its body."""
_LEAVE_S = 10
"""For answers that are under way when the service is told to end."""


def serve(service: Service, *, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve `service` as `run` does."""
    # As uvicorn, it says nothing of clients that leave: they would fill a log.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    run(config_of(service), host=host, port=port, ready=ready)


def config_of(service: Service) -> uvicorn.Config:
    """How `service` is served: within limits that no visitor passes."""
    return uvicorn.Config(
        application(service), http=limited_to(most_connections()), backlog=BACKLOG,
        log_level="error", access_log=False, server_header=False, lifespan="off", ws="none",
        h11_max_incomplete_event_size=_LONGEST_HEAD, timeout_graceful_shutdown=_LEAVE_S,
    )  # fmt: skip
