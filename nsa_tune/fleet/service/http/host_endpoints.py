"""Addresses at which hosts tell what they ran, doubt and want."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_tune.fleet.service.documents import text_in
from nsa_tune.fleet.service.http.messages import (
    answer,
    body_file,
    document_in,
    streamed,
    tagged,
    target_in,
)
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.service import Service
from nsa_tune.fleet.service.tables.uploads import MOST_BYTES

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_TYPE = "application/x-ndjson"


class HostEndpoints:
    """What hosts are answered that run an engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def decisions(self, request: Request) -> Response:
        """Count a decision log."""
        weights, sender = self._service.weights, request.state.sender
        async with body_file(request, self._service, MOST_BYTES) as path:
            counted = await self._service.check(lambda: weights.add(path, sender))
        return answer(counted._asdict())

    async def weights(self, request: Request) -> Response:
        """How often each batch of a table ran, as a decision log."""
        target, weights = target_in(request), self._service.weights
        version = await self._service.in_state(weights.version, target)
        if not version:
            return tagged(request, b"", _TYPE)
        body = await self._service.body(
            f"weights of {target.name}", version,
            lambda path: path.write_bytes(weights.log_for(target)),
        )  # fmt: skip
        return streamed(request, body, _TYPE)

    async def forget(self, request: Request) -> Response:
        """Forget how often batches ran, of a GPU or of tables that a token made known."""
        document = await document_in(request)
        by, gpu = text_in(document, "by", ""), text_in(document, "gpu", "")
        return answer(
            {"tables": await self._service.in_state(self._service.weights.forget, by, gpu)}
        )

    async def findings(self, request: Request) -> Response:
        """Doubt a table."""
        document = await document_in(request)
        keys = (await self._service.held()).keys
        doubt = self._service.demand.found
        job = await self._service.in_state(doubt, document, keys, request.state.sender)
        return answer({"job": job.as_document()})

    async def wanted(self, request: Request) -> Response:
        """Ask for a table."""
        document = await document_in(request)
        target = Target.of(document["key"] if isinstance(document.get("key"), dict) else document)
        keys = (await self._service.held()).keys
        wanted = self._service.demand.wanted
        digest, job = await self._service.in_state(wanted, target, keys, request.state.sender)
        return answer({"table": digest or None, "job": None if job is None else job.as_document()})
