"""What addresses have in common: bodies of requests, and answers as JSON or in blocks of a file."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from nsa_tune._errors import UsageError
from nsa_tune.fleet.service.documents import parsed
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.service import Service
from nsa_tune.fleet.service.tables.bodies import BLOCK, Body
from nsa_tune.reports.dashboard.access import tag_headers, unchanged

if TYPE_CHECKING:
    from starlette.requests import Request

_COUNT = re.compile("[0-9]{1,9}")
_RENEWED = 2**21
"""Bytes that a client has to take within the time limit of an answer."""
_MAX_DOCUMENT = 2**15
"""Bytes of a JSON body, which is held in memory."""


async def document_in(request: Request) -> dict[str, Any]:
    """The JSON object in the body.

    Raises:
        HTTPException: when the body is too long.
        UsageError: when it is no JSON object.
    """
    body = bytearray()
    async for part in _parts(request, _MAX_DOCUMENT):
        body += part
    return parsed(bytes(body))


@asynccontextmanager
async def body_file(request: Request, service: Service, most: int) -> AsyncIterator[Path]:
    """The body as a file, whose name is that of the sender's token.

    Raises:
        Busy: when too many are received.
        HTTPException: when the body is longer than `most` bytes.
        UsageError: when it is not what the hash in its header says.
        OSError: when it cannot be written.
    """
    sender = request.state.sender
    with (
        service.receiving(sender),
        tempfile.TemporaryDirectory(prefix="nsa-tune-upload-") as folder,
    ):
        path = Path(folder, f"{sender}.tsv")
        with path.open("wb") as file:
            async for part in _parts(request, most):
                file.write(part)
        yield path


async def _parts(request: Request, most: int) -> AsyncIterator[bytes]:
    """The body's parts; refused as soon as it is known to be longer than `most` bytes."""
    announced = request.headers.get("content-length", "0")
    length = int(announced) if announced.isdecimal() and len(announced) < 16 else most + 1
    digest = hashlib.sha256()
    total = 0
    if length <= most:
        async for part in request.stream():
            total += len(part)
            if total > most:
                break
            digest.update(part)
            yield part
        else:
            promised = request.headers.get("x-content-sha256", "").lower()
            if promised and promised != digest.hexdigest():
                raise UsageError("the body is not what its X-Content-SHA256 says: send it again")
            return
    raise HTTPException(413, f"the body has more than {most} bytes")


def answer(document: Mapping[str, Any], status: int = 200) -> Response:
    """A JSON object as an answer that is not kept."""
    headers = {"cache-control": "no-store"}
    return Response(document_text(document), status, headers, "application/json")


def document_text(document: Mapping[str, Any]) -> str:
    """A JSON object as it is sent."""
    return json.dumps(document, ensure_ascii=False)


def tagged(request: Request, content: bytes, media_type: str) -> Response:
    """`content` with its hash, or 304 for whoever has it already."""
    digest = hashlib.sha256(content).hexdigest()
    tag = f"sha256-{digest}"
    if same := unchanged(request, tag):
        return same
    headers = {**tag_headers(tag), "x-content-sha256": digest}
    return Response(content, headers=headers, media_type=media_type)


def streamed(request: Request, body: Body, media_type: str, tag: str = "") -> Response:
    """`body` with its hash in blocks, each when the one before is on its way, compressed if the
    client takes that; or 304 for whoever has it already. Its tag is its hash unless given."""
    tag = tag or f"sha256-{body.sha256}"
    if same := unchanged(request, tag):
        return same
    headers = {**tag_headers(tag), "x-content-sha256": body.sha256, "vary": "accept-encoding"}
    file = body.plain
    if body.packed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        file = body.packed
        headers["content-encoding"] = "gzip"
    headers["content-length"] = str(file.size)

    # Of `Limited`: whoever takes the body, however slowly, may go on.
    extensions = request.scope.get("extensions") or {}
    renew = extensions.get("nsa_tune.renew", {}).get("renew", lambda: None)

    async def blocks() -> AsyncIterator[bytes]:
        for begin in range(0, file.size, BLOCK):
            yield file.block(begin)
            # Also where nothing is sent, because the client has gone.
            await asyncio.sleep(0)
            if begin % _RENEWED == 0:
                renew()

    return StreamingResponse(blocks(), headers=headers, media_type=media_type)


def target_in(request: Request) -> Target:
    """The table that the query of an address names.

    Raises:
        UsageError: when it names none.
    """
    query: dict[str, Any] = dict(request.query_params)
    if _COUNT.fullmatch(query.get("heads", "")):
        query["heads"] = int(query["heads"])
    return Target.of(query)
