"""Addresses of jobs: for those who decide on them, and for workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.points import points_for
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.fleet.service.documents import libraries_in, names_in, number_in, seconds_in, text_in
from nsa_tune.fleet.service.http.messages import answer, document_in
from nsa_tune.fleet.service.jobs.job import Job, Worker
from nsa_tune.fleet.service.jobs.page import queue_page
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.service import Service

if TYPE_CHECKING:
    from starlette.requests import Request

_NUMBER = re.compile("[0-9]{1,18}")
"""What SQLite may have as the number of a row."""
_LONGEST_SHOWN = 40
_CLAIM = re.compile(r"[A-Za-z0-9_-]{16,128}")


class JobEndpoints:
    """What the addresses of jobs answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def jobs(self, request: Request) -> Response:
        """The newest jobs; `?state=` selects."""
        state = request.query_params.get("state", "")
        found = await run_in_threadpool(self._service.jobs.all, state)
        return answer({"jobs": [job.as_document() for job in found]})

    async def create(self, request: Request) -> Response:
        """A new job, approved."""
        document = await document_in(request)
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
        document = await document_in(request)
        worker = Worker(
            text_in(document, "worker"), text_in(document, "gpu"), text_in(document, "driver", ""),
            libraries_in(document) or (),
        )  # fmt: skip
        claim, keys = _claim(document), await self._service.keys()
        await run_in_threadpool(self._service.demand.arrived, worker, keys)
        job = await run_in_threadpool(self._service.jobs.claim, worker, claim)
        found = None if job is None else job.as_document()
        return answer({"job": found, "lease_s": self._service.jobs.lease_s})

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
        return answer({"workers": listed})

    async def queue(self, request: Request) -> Response:
        """The queue as a page."""
        del request

        def made() -> str:
            jobs, demand = self._service.jobs, self._service.demand
            return queue_page(jobs.all(), jobs.workers(), demand.doubtful())

        text = await run_in_threadpool(made)
        return Response(text, headers={"cache-control": "no-store"}, media_type="text/html")

    async def _own(self, request: Request) -> tuple[int, str, dict[str, Any]]:
        document = await document_in(request)
        return _number(request), _claim(document), document


def _number(request: Request) -> int:
    word: str = request.path_params["number"]
    if not _NUMBER.fullmatch(word):
        raise NoTunedData(f"there is no job {word[:_LONGEST_SHOWN]}")
    return int(word)


def _claim(document: Mapping[str, Any]) -> str:
    claim = text_in(document, "claim")
    if not _CLAIM.fullmatch(claim):
        raise UsageError("'claim' must be 16 to 128 letters and digits that the worker made up")
    return claim


def _of_job(job: Job, status: int = 200) -> Response:
    return answer({"job": job.as_document()}, status)
