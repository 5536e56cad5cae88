"""What addresses have in common: bodies of requests, and answers as JSON or with a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from nsa_tune._errors import UsageError
from nsa_tune.fleet.service.documents import parsed
from nsa_tune.fleet.service.tables.copies import Copy

if TYPE_CHECKING:
    from starlette.requests import Request

_MOST_DOCUMENT = 2**18
"""Bytes of a JSON body."""


async def document_in(request: Request) -> dict[str, Any]:
    """The JSON object in the body.

    Raises:
        HTTPException: when the body is too long.
        UsageError: when it is no JSON object.
    """
    return parsed(await body_of(request, _MOST_DOCUMENT))


async def body_of(request: Request, most: int) -> bytes:
    """The body; refused as soon as it is known to be longer than `most` bytes.

    Raises:
        HTTPException: when it is longer.
        UsageError: when it is not what the hash in its header says.
    """
    announced = request.headers.get("content-length", "0")
    found = bytearray()
    if not announced.isdecimal() or int(announced) <= most:
        async for part in request.stream():
            found += part
            if len(found) > most:
                break
        else:
            _check_hash(request, found)
            return bytes(found)
    raise HTTPException(413, f"the body has more than {most} bytes")


def _check_hash(request: Request, body: bytes | bytearray) -> None:
    promised = request.headers.get("x-content-sha256", "").lower()
    if promised and promised != hashlib.sha256(body).hexdigest():
        raise UsageError("the body is not what its X-Content-SHA256 says: send it again")


def answer(document: Mapping[str, Any], status: int = 200) -> Response:
    """A JSON object as an answer that is not kept."""
    text = json.dumps(document, ensure_ascii=False)
    return Response(text, status, {"cache-control": "no-store"}, "application/json")


def document_copy(document: Mapping[str, Any]) -> Copy:
    """A JSON object with its hash, for `tagged`."""
    return Copy.of(json.dumps(document, ensure_ascii=False).encode())


def tagged(request: Request, copy: Copy, media_type: str) -> Response:
    """`copy` with its hash, or 304 for whoever has it already."""
    tag = f'"sha256-{copy.sha256}"'
    headers = {"etag": tag, "x-content-sha256": copy.sha256, "cache-control": "private, no-cache"}
    known = request.headers.get("if-none-match", "").split(",")
    if {tag, "*"} & {one.strip().removeprefix("W/") for one in known}:
        return Response(status_code=304, headers=headers)
    return Response(copy.body, headers=headers, media_type=media_type)
