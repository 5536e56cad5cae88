"""Addresses at which hosts tell what they ran, doubt and want."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from nsa_tune.fleet.service.http.messages import answer, body_of, document_in, tagged
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.service import Service
from nsa_tune.fleet.service.tables.copies import Copy
from nsa_tune.fleet.service.tables.uploads import MOST_BYTES

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_COUNT = re.compile("[0-9]{1,9}")


class HostEndpoints:
    """What hosts are answered that run an engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def decisions(self, request: Request) -> Response:
        """Count a decision log."""
        body = await body_of(request, MOST_BYTES)
        counted = await run_in_threadpool(self._service.weights.add, body)
        return answer(counted._asdict())

    async def weights(self, request: Request) -> Response:
        """How often each batch of a table ran, as a decision log."""
        query: dict[str, Any] = dict(request.query_params)
        if _COUNT.fullmatch(query.get("heads", "")):
            query["heads"] = int(query["heads"])
        log = await run_in_threadpool(self._service.weights.log_for, Target.of(query))
        return tagged(request, Copy.of(log), "application/x-ndjson")

    async def findings(self, request: Request) -> Response:
        """Doubt a table."""
        document = await document_in(request)
        keys = await self._service.keys()
        job = await run_in_threadpool(
            self._service.demand.found, document, keys, request.state.sender
        )
        return answer({"job": job.as_document()})

    async def wanted(self, request: Request) -> Response:
        """Ask for a table."""
        document = await document_in(request)
        target = Target.of(document["key"] if isinstance(document.get("key"), dict) else document)
        keys = await self._service.keys()
        digest, job = await run_in_threadpool(
            self._service.demand.wanted, target, keys, request.state.sender
        )
        return answer({"table": digest or None, "job": None if job is None else job.as_document()})
