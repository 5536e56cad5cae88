"""Talks to a service over HTTP, with the standard library. A service that is away is waited for."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib import error as url_errors
from urllib import request as requests
from urllib.parse import urlsplit

from nsa_tune._errors import NsaTuneError, UsageError

_TIMEOUT_S = 60.0
"""Of one request; the service takes no longer to answer."""
_MOST_BYTES = 2**26
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_AGAIN = frozenset({429, 500, 502, 503, 504})
"""What may be different a moment later. Everything that the service takes may be sent twice."""


class Refused(NsaTuneError):
    """The service answered with an error; the text is its sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Unreachable(NsaTuneError):
    """The service did not answer for as long as it was waited for."""


class Client:
    """A service at an address, and a token for it."""

    def __init__(self, url: str, token: str, *, patience_s: float = 600.0) -> None:
        """`patience_s` is how long a request is tried again when there is no answer.

        Raises:
            UsageError: when `url` is no address.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise UsageError(
                f"{url!r} is no address of a service, like https://tables.example:8401"
            )
        if parts.username or parts.password:
            raise UsageError("a token in the address would be shown in logs; set NSA_TUNE_TOKEN")
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        self._token = token
        self._opener = _opener()
        self.given_up = threading.Event()
        """Set it to end waiting in every thread."""

    def with_patience(self, patience_s: float) -> Client:
        """The same service, waited for so long."""
        return Client(self.url, self._token, patience_s=patience_s)

    def get(self, path: str) -> bytes:
        """The body at `path`.

        Raises:
            Refused: when the service refuses.
            Unreachable: when it does not answer.
        """
        return self._patiently("GET", path, None)

    def document(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises as `get`."""
        return _parsed(self.get(path))

    def post(self, path: str, body: bytes | Mapping[str, Any]) -> dict[str, Any]:
        """What the service answers to `body`. Raises as `get`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return _parsed(self._patiently("POST", path, data))

    def _patiently(self, method: str, path: str, data: bytes | None) -> bytes:
        end = time.monotonic() + self.patience_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return self._once(method, path, data)
            except Refused as error:
                if error.status not in _AGAIN:
                    raise
                problem = str(error)
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                problem = f"{self.url} does not answer: {reason or type(error).__name__}"
            # Hosts that lost the same service shall not all come back in the same moment.
            wait = pause * (0.5 + random.random())
            if time.monotonic() + wait > end or self.given_up.wait(wait):
                raise Unreachable(problem)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _once(self, method: str, path: str, data: bytes | None) -> bytes:
        request = requests.Request(self.url + path, data, method=method)
        request.add_header("Authorization", f"Bearer {self._token}")
        if data is not None:
            request.add_header("Content-Type", "application/octet-stream")
            request.add_header("X-Content-SHA256", hashlib.sha256(data).hexdigest())
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                body: bytes = answer.read(_MOST_BYTES + 1)
                promised = answer.headers.get("X-Content-SHA256", "")
        except url_errors.HTTPError as error:
            with error:
                raise Refused(error.code, _sentence(error, self.url)) from None
        if len(body) > _MOST_BYTES:
            raise Refused(200, f"{self.url}{path} sends more than {_MOST_BYTES} bytes")
        if promised and promised != hashlib.sha256(body).hexdigest():
            raise http.client.HTTPException("what came is not what was sent")
        return body


class _NoRedirect(requests.HTTPRedirectHandler):
    """Does not follow: the token would go wherever the answer points."""

    def redirect_request(self, *_: object) -> None:
        """Nothing."""


def _opener() -> requests.OpenerDirector:
    # Not build_opener, which adds handlers for files and FTP.
    opener = requests.OpenerDirector()
    for handler in (
        requests.ProxyHandler(), requests.HTTPHandler(), requests.HTTPSHandler(), _NoRedirect(),
        requests.HTTPDefaultErrorHandler(), requests.HTTPErrorProcessor(),
    ):  # fmt: skip
        opener.add_handler(handler)
    return opener


def _sentence(error: url_errors.HTTPError, url: str) -> str:
    """What the service says is wrong."""
    try:
        told = json.loads(error.read(2**16))["error"]
    except (
        OSError, ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException
    ):  # fmt: skip
        return f"{url} answers {error.code} {error.reason}; is it a service of nsa-tune?"
    return f"{url} refuses: {told}"


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise Refused(200, "the answer is no JSON object; is it a service of nsa-tune?")
    return document


@contextmanager
def reading() -> Iterator[None]:
    """Around reading an answer: another server's has other fields.

    Raises:
        Refused: when the answer lacks a field, or has another kind of value in it.
    """
    try:
        yield
    except KeyError as error:
        raise Refused(200, f"the answer has no {error}; is it a service of nsa-tune?") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise Refused(200, f"the answer is odd ({error}); is it a service of nsa-tune?") from error
