"""What the dashboard and the service answer alike: careful headers, and 304 for what is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


def sealed(app: ASGIApp) -> ASGIApp:
    """`app` with the headers on every answer that keep a browser careful."""
    careful = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *careful]}
            await send(message)

        await app(scope, receive, with_headers)

    return answered


def tag_headers(tag: str) -> dict[str, str]:
    """Headers of content with this tag, which a browser may keep, but asks for again."""
    return {"etag": f'"{tag}"', "cache-control": "private, no-cache"}


def unchanged(request: Request, tag: str) -> Response | None:
    """304 for whoever has the content of this tag; None for the others."""
    tags = request.headers.get("if-none-match", "").split(",")
    if {f'"{tag}"', "*"}.isdisjoint(text.strip().removeprefix("W/") for text in tags):
        return None
    return Response(status_code=304, headers=tag_headers(tag))
