"""What each address answers. Errors leave as exceptions; `application` makes sentences of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nsa_tune._errors import UsageError
from nsa_tune.backend.points import points_for
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.fleet.service.documents import (
    libraries_in,
    names_in,
    number_in,
    parsed,
    seconds_in,
    text_in,
)
from nsa_tune.fleet.service.jobs.job import Job, Worker
from nsa_tune.fleet.service.jobs.page import queue_page
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.metrics import CONTENT_TYPE_LATEST
from nsa_tune.fleet.service.service import Service
from nsa_tune.fleet.service.tables.copies import Copy
from nsa_tune.fleet.service.tables.uploads import MOST_BYTES

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["Endpoints"]

_MOST_DOCUMENT = 2**18
"""Bytes of a JSON body."""
_CLAIM = re.compile(r"[A-Za-z0-9_-]{16,128}")


class Endpoints:
    """The answers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # --- tables

    async def database(self, request: Request) -> Response:
        """The whole database as one file."""
        copy = await self._service.copy.get()
        return _tagged(request, copy, "application/vnd.sqlite3")

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
        return _tagged(request, _json_copy({"tables": listed}), "application/json")

    async def table(self, request: Request) -> Response:
        """The text of one table."""
        content = request.path_params["content"]
        for one in await self._service.texts.get():
            if one.text.sha256 == content:
                return _tagged(request, one.text, "text/tab-separated-values")
        raise HTTPException(
            404, "there is no table with this content; it may have changed: see /v1/tables"
        )

    async def upload(self, request: Request) -> Response:
        """Merge a text table."""
        body = await _body(request, MOST_BYTES)
        merged = await self._service.upload(body, request.state.sender)
        return _json(merged._asdict())

    # --- what hosts say

    async def decisions(self, request: Request) -> Response:
        """Count a decision log."""
        body = await _body(request, MOST_BYTES)
        counted = await run_in_threadpool(self._service.weights.add, body)
        return _json(counted._asdict())

    async def weights(self, request: Request) -> Response:
        """How often each batch of a table ran, as a decision log."""
        query: dict[str, Any] = dict(request.query_params)
        if query.get("heads", "").isdecimal():
            query["heads"] = int(query["heads"])
        log = await run_in_threadpool(self._service.weights.log_for, Target.of(query))
        return _tagged(request, Copy.of(log), "application/x-ndjson")

    async def findings(self, request: Request) -> Response:
        """Doubt a table."""
        document = await _document(request)
        keys = await self._service.keys()
        job = await run_in_threadpool(
            self._service.demand.found, document, keys, request.state.sender
        )
        return _json({"job": job.as_document()})

    async def wanted(self, request: Request) -> Response:
        """Ask for a table."""
        document = await _document(request)
        target = Target.of(document["key"] if isinstance(document.get("key"), dict) else document)
        keys = await self._service.keys()
        digest, job = await run_in_threadpool(
            self._service.demand.wanted, target, keys, request.state.sender
        )
        return _json({"table": digest or None, "job": None if job is None else job.as_document()})

    # --- jobs

    async def jobs(self, request: Request) -> Response:
        """The newest jobs; `?state=` selects."""
        state = request.query_params.get("state", "")
        found = await run_in_threadpool(self._service.jobs.all, state)
        return _json({"jobs": [job.as_document() for job in found]})

    async def create(self, request: Request) -> Response:
        """A new job, approved."""
        document = await _document(request)
        target, points = Target.of(document), names_in(document, "points")
        points_for(profile_of(target.model), points)
        job = await run_in_threadpool(
            lambda: self._service.jobs.create(
                target, by=request.state.sender, points=points,
                fresh=document.get("fresh") is True, budget_s=seconds_in(document, "budget_s"),
            )
        )  # fmt: skip
        return _of_job(job, 201)

    async def approve(self, request: Request) -> Response:
        """Queue a proposal."""
        return _of_job(await run_in_threadpool(self._service.jobs.approve, _number(request)))

    async def cancel(self, request: Request) -> Response:
        """End a job."""
        return _of_job(await run_in_threadpool(self._service.jobs.cancel, _number(request)))

    async def claim(self, request: Request) -> Response:
        """Give a worker a job, or none."""
        document = await _document(request)
        worker = Worker(
            text_in(document, "worker"), text_in(document, "gpu"), text_in(document, "driver", ""),
            libraries_in(document) or (),
        )  # fmt: skip
        claim, keys = _claim(document), await self._service.keys()
        await run_in_threadpool(self._service.demand.arrived, worker, keys)
        job = await run_in_threadpool(self._service.jobs.claim, worker, claim)
        found = None if job is None else job.as_document()
        return _json({"job": found, "lease_s": self._service.jobs.lease_s})

    async def beat(self, request: Request) -> Response:
        """A worker is still at it."""
        number, claim, document = await self._own(request)
        jobs = self._service.jobs
        return _of_job(
            await run_in_threadpool(jobs.beat, number, claim, number_in(document, "rows", 0))
        )

    async def done(self, request: Request) -> Response:
        """A worker has finished."""
        number, claim, document = await self._own(request)
        rows, message = number_in(document, "rows", 0), text_in(document, "message", "")
        done = self._service.jobs.done
        return _of_job(await run_in_threadpool(done, number, claim, rows, message))

    async def failed(self, request: Request) -> Response:
        """A worker cannot do it."""
        number, claim, document = await self._own(request)
        rows, message = number_in(document, "rows", 0), text_in(document, "message")
        failed = self._service.jobs.failed
        return _of_job(await run_in_threadpool(failed, number, claim, rows, message))

    async def release(self, request: Request) -> Response:
        """A worker has to stop: somebody else shall do it."""
        number, claim, _ = await self._own(request)
        return _of_job(await run_in_threadpool(self._service.jobs.give_back, number, claim))

    async def workers(self, request: Request) -> Response:
        """Who has asked for jobs."""
        del request
        found = await run_in_threadpool(self._service.jobs.workers)
        listed = [
            {
                "name": worker.name, "gpu": worker.gpu, "driver": worker.driver,
                "libraries": dict(worker.libraries),
                "seen_at": datetime.fromtimestamp(seen, UTC).isoformat(timespec="seconds"),
            }
            for worker, seen in found
        ]  # fmt: skip
        return _json({"workers": listed})

    async def queue(self, request: Request) -> Response:
        """The queue as a page."""
        del request

        def made() -> str:
            jobs, demand = self._service.jobs, self._service.demand
            return queue_page(jobs.all(), jobs.workers(), demand.doubtful())

        text = await run_in_threadpool(made)
        return Response(text, headers={"cache-control": "no-store"}, media_type="text/html")

    # --- about itself

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        del request
        text = await run_in_threadpool(self._service.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def health(self, request: Request) -> Response:
        """That it answers; nothing else, as it needs no token."""
        del request
        return _json({"ok": True})

    async def _own(self, request: Request) -> tuple[int, str, dict[str, Any]]:
        document = await _document(request)
        return _number(request), _claim(document), document


def _number(request: Request) -> int:
    number: int = request.path_params["number"]
    return number


def _claim(document: Mapping[str, Any]) -> str:
    claim = text_in(document, "claim")
    if not _CLAIM.fullmatch(claim):
        raise UsageError("'claim' must be 16 to 128 letters and digits that the worker made up")
    return claim


async def _document(request: Request) -> dict[str, Any]:
    return parsed(await _body(request, _MOST_DOCUMENT))


async def _body(request: Request, most: int) -> bytes:
    """The body; refused as soon as it is known to be longer than `most` bytes."""
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


def _of_job(job: Job, status: int = 200) -> Response:
    return _json({"job": job.as_document()}, status)


def _json(document: Mapping[str, Any], status: int = 200) -> Response:
    text = json.dumps(document, ensure_ascii=False)
    return Response(text, status, {"cache-control": "no-store"}, "application/json")


def _json_copy(document: Mapping[str, Any]) -> Copy:
    return Copy.of(json.dumps(document, ensure_ascii=False).encode())


def _tagged(request: Request, copy: Copy, media_type: str) -> Response:
    """`copy` with its hash, or 304 for whoever has it already."""
    tag = f'"sha256-{copy.sha256}"'
    headers = {"etag": tag, "x-content-sha256": copy.sha256, "cache-control": "private, no-cache"}
    known = request.headers.get("if-none-match", "").split(",")
    if {tag, "*"} & {one.strip().removeprefix("W/") for one in known}:
        return Response(status_code=304, headers=headers)
    return Response(copy.body, headers=headers, media_type=media_type)
