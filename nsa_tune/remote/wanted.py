"""Telling a service which table this host would have liked, so that somebody measures it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping

from nsa_tune._errors import NsaTuneError
from nsa_tune.remote.address import Address
from nsa_tune.remote.client import hasty

_log = logging.getLogger(__name__)
_asked: set[bytes] = set()


def ask_for(service: Address, wanted: Mapping[str, object]) -> threading.Thread | None:
    """Ask `service` for a table of the key fields `wanted`, once a process.

    Nobody has to wait for the thread that does it. None where there is nothing to do.
    """
    body = json.dumps(wanted, sort_keys=True).encode()
    if body in _asked or not service.is_service:
        return None
    _asked.add(body)
    thread = threading.Thread(
        target=_ask, args=(service, body), name="nsa-tune-wanted", daemon=True
    )
    thread.start()
    return thread


def _ask(service: Address, body: bytes) -> None:
    url = service.server
    try:
        hasty(url).post("/v1/wanted", body)
    except NsaTuneError as error:
        _log.warning("no table was asked for: %s", error)
    else:
        _log.info("%s was asked for a table of this machine", url)
