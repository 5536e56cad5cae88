"""Who may call what: a token in the Authorization header, or for pages in a cookie."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.responses import Response

from nsa_tune.fleet.service.auth.tokens import Role, Token, Tokens

if TYPE_CHECKING:
    from starlette.requests import Request

Endpoint = Callable[["Request"], Awaitable[Response]]

_COOKIE = "nsa_tune_service_token"
_HOW = (
    "send a token that `nsa-tune token add` made, as 'Authorization: Bearer TOKEN'; in a browser "
    "open this page with ?token=TOKEN once"
)


class Gate:
    """Lets requests with a sufficient token through to an endpoint."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def guarded(self, endpoint: Endpoint, role: Role) -> Endpoint:
        """`endpoint`, for tokens of `role` and above. It finds the token's name in
        `request.state.sender`."""

        async def passed(request: Request) -> Response:
            scheme, _, secret = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                raise _unauthorized(f"this needs a token: {_HOW}")
            request.state.sender = self._checked(secret.strip(), role).name
            return await endpoint(request)

        return passed

    def guarded_page(self, endpoint: Endpoint) -> Endpoint:
        """The same for a page, which a browser asks for: the token may come in a cookie, and gets
        there from `?token=` in an address that was opened once."""
        guarded = self.guarded(endpoint, Role.READ)

        async def passed(request: Request) -> Response:
            given = request.query_params.get("token")
            if given is not None:
                self._checked(given, Role.READ)
                return _moved(request, given)
            cookie = request.cookies.get(_COOKIE)
            if cookie is None or "authorization" in request.headers:
                return await guarded(request)
            self._checked(cookie, Role.READ)
            return await endpoint(request)

        return passed

    def _checked(self, secret: str, role: Role) -> Token:
        token = self._tokens.find(secret)
        if token is None:
            raise _unauthorized(f"this token is not known here, or was revoked: {_HOW}")
        if not token.role.allows(role):
            raise HTTPException(
                403, f"token {token.name} has the role {token.role}, and this needs {role}"
            )
        return token


def _unauthorized(sentence: str) -> HTTPException:
    return HTTPException(401, sentence, {"www-authenticate": "Bearer"})


def _moved(request: Request, secret: str) -> Response:
    """To the same page, with the token in a cookie and no longer in the address bar."""
    others = [
        (name, value) for name, value in request.query_params.multi_items() if name != "token"
    ]
    response = Response(status_code=303, headers={"cache-control": "no-store"})
    response.headers["location"] = request.url.path + (f"?{urlencode(others)}" if others else "")
    response.set_cookie(
        _COOKIE, secret, httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )
    return response
