"""Addresses of tables: the database, its tables as texts, and uploads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from nsa_tune.fleet.service.http.messages import answer, body_of, document_copy, tagged
from nsa_tune.fleet.service.service import Service
from nsa_tune.fleet.service.tables.uploads import MOST_BYTES

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class TableEndpoints:
    """What the addresses of tables answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def database(self, request: Request) -> Response:
        """The whole database as one file."""
        copy = await self._service.copy.get()
        return tagged(request, copy, "application/vnd.sqlite3")

    async def tables(self, request: Request) -> Response:
        """What tables there are, each with the hash of its text."""
        doubtful = await run_in_threadpool(self._service.demand.doubtful)
        listed = [
            {
                "digest": one.key.digest,
                **one.key.as_document(),
                "rows": one.rows,
                "measured_at": one.measured_at,
                "content": one.text.sha256,
                "url": f"/v1/tables/{one.text.sha256}",
                "doubtful": doubtful.get(one.key.digest, []),
            }
            for one in await self._service.texts.get()
        ]
        return tagged(request, document_copy({"tables": listed}), "application/json")

    async def table(self, request: Request) -> Response:
        """The text of one table."""
        content = request.path_params["content"]
        for one in await self._service.texts.get():
            if one.text.sha256 == content:
                return tagged(request, one.text, "text/tab-separated-values")
        raise HTTPException(
            404, "there is no table with this content; it may have changed: see /v1/tables"
        )

    async def upload(self, request: Request) -> Response:
        """Merge a text table."""
        body = await body_of(request, MOST_BYTES)
        merged = await self._service.upload(body, request.state.sender)
        return answer(merged._asdict())
