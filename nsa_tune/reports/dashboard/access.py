"""Access control: only this machine, or visitors with the token."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from nsa_tune._errors import UsageError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_COOKIE = "nsa_tune_token"
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{1,256}")
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
"""Headers of every response."""


def is_loopback(host: str) -> bool:
    """Whether `host` is an address that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def token_for(host: str, *, remote: bool, given: str | None) -> str | None:
    """The token that visitors need: `given`, or a new one where others can reach `host`.

    None on this machine's own address, if none is given.

    Raises:
        UsageError: when others can reach `host` and `remote` is false, or when `given` has
            characters that an address or a cookie would need to escape.
    """
    if given is not None and not _TOKEN.fullmatch(given):
        raise UsageError(
            "a token has the letters A to Z, digits and . _ ~ - only, at most 256 of them"
        )
    if is_loopback(host):
        return given
    if not remote:
        raise UsageError(
            f"others can reach {host}; allow that with --remote, which makes them need a token"
        )
    return given or secrets.token_urlsafe(24)


class Gate:
    """Passes permitted requests to `app`, and refuses the others. Only reading is permitted."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        if scope["type"] != "http":
            # The dashboard has no websockets.
            await send({"type": "websocket.close", "code": 1008})
            return
        refused = self._refusal(scope)
        if refused is not None:
            status, words, headers = refused
            start = {"type": "http.response.start", "status": status, "headers": headers}
            await sealed(start)
            await send({"type": "http.response.body", "body": words.encode()})
            return
        await self._app(scope, receive, sealed)

    def _refusal(self, scope: Scope) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        """(status, text, headers) of a refusal; None if the request is permitted."""
        plain = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this dashboard only reads\n", [*plain, (b"allow", b"GET, HEAD")]
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self._token is None:
            # Against DNS rebinding: a hostile page could point its own name at 127.0.0.1.
            host = headers.get(b"host", "").rsplit(":", 1)[0] if _has_port(headers) else (
                headers.get(b"host", "")
            )  # fmt: skip
            if host not in _LOCAL_NAMES:
                return 421, "this dashboard answers to 127.0.0.1 and localhost only\n", plain
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        given = query.get("token", [""])[0]
        if given and self._matches(given):
            # Moved into a cookie, so that it is not left in the address bar and the history.
            cookie = f"{_COOKIE}={given}; HttpOnly; SameSite=Strict; Path=/".encode("latin-1")
            moved = [*plain, (b"location", b"."), (b"set-cookie", cookie)]
            return 303, "", moved
        if self._matches(_bearer(headers)) or self._matches(_cookie(headers)):
            return None
        words = "open the address that nsa-tune dashboard printed; it contains the token\n"
        return 401, words, [*plain, (b"www-authenticate", b"Bearer")]

    def _matches(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode("utf-8"), self._token.encode("utf-8"))


def _has_port(headers: Mapping[bytes, str]) -> bool:
    _, _, last = headers.get(b"host", "").rpartition(":")
    return last.isdecimal()


def _bearer(headers: Mapping[bytes, str]) -> str:
    scheme, _, given = headers.get(b"authorization", "").partition(" ")
    return given if scheme.lower() == "bearer" else ""


def _cookie(headers: Mapping[bytes, str]) -> str:
    try:
        cookie = SimpleCookie(headers.get(b"cookie", ""))
    except CookieError:
        return ""
    return cookie[_COOKIE].value if _COOKIE in cookie else ""
