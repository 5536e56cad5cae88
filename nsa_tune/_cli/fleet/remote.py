"""What the commands that talk to a service share: its address and the token for it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from nsa_tune._errors import UsageError
from nsa_tune.remote.client import TOKEN, Client, token

_URL = "NSA_TUNE_SERVICE"

Url = Annotated[
    str | None,
    typer.Argument(
        metavar="[URL]",
        help=f"Address of the service, like https://tables.example:8401. Default: {_URL}.",
        show_default=False,
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", help=f"Address of the service. Default: {_URL}.", show_default=False),
]


def client_of(url: str | None, patience_s: float) -> Client:
    """The service at `url`, or at NSA_TUNE_SERVICE, with the token in NSA_TUNE_TOKEN.

    Raises:
        UsageError: when one of the two is not there.
    """
    address, secret = url or os.environ.get(_URL, ""), token()
    if not address:
        raise UsageError(f"give the address of a service, or set {_URL}")
    if not secret:
        raise UsageError(f"set {TOKEN} to the token that `nsa-tune token add` printed")
    return Client(address, secret, patience_s=patience_s)
