"""Addresses of jobs: for those who decide on them, and for workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.points import points_for
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.fleet.service.documents import libraries_in, names_in, number_in, seconds_in, text_in
from nsa_tune.fleet.service.http.messages import answer, document_in, document_text, streamed
from nsa_tune.fleet.service.jobs.job import STATES, Job, Worker, at
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.service import Service

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

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
        if state not in ("", *STATES):
            return answer({"jobs": []})
        all_jobs = self._service.jobs.all
        body = await self._service.state_body(
            f"jobs {state}",
            lambda: document_text({"jobs": [job.as_document() for job in all_jobs(state)]}),
        )
        return streamed(request, body, "application/json")

    async def create(self, request: Request) -> Response:
        """A new job, approved."""
        document = await document_in(request)
        target, points = Target.of(document), names_in(document, "points")
        points_for(profile_of(target.model), points)
        job = await self._service.in_state(
            lambda: self._service.jobs.create(
                target, by=request.state.sender, points=points,
                fresh=document.get("fresh") is True, budget_s=seconds_in(document, "budget_s"),
            )
        )  # fmt: skip
        return _of_job(job, 201)

    async def approve(self, request: Request) -> Response:
        """Queue a proposal."""
        return _of_job(await self._service.in_state(self._service.jobs.approve, _number(request)))

    async def cancel(self, request: Request) -> Response:
        """End a job."""
        return _of_job(await self._service.in_state(self._service.jobs.cancel, _number(request)))

    async def cancel_proposals(self, request: Request) -> Response:
        """End what waits of the proposals of a token."""
        by = text_in(await document_in(request), "by")
        cancel = self._service.jobs.cancel_proposals
        return answer({"cancelled": await self._service.in_state(cancel, by)})

    async def claim(self, request: Request) -> Response:
        """Give a worker a job, or none."""
        document = await document_in(request)
        worker = Worker(
            text_in(document, "worker"), text_in(document, "gpu"), text_in(document, "driver", ""),
            libraries_in(document) or (),
        )  # fmt: skip
        claim, keys = _claim(document), (await self._service.held()).keys
        arrived, sender = self._service.demand.arrived, request.state.sender
        await self._service.in_state(arrived, worker, keys, sender)
        job = await self._service.in_state(self._service.jobs.claim, worker, claim)
        claimed = None if job is None else job.as_document()
        return answer({"job": claimed, "lease_s": self._service.jobs.lease_s})

    async def beat(self, request: Request) -> Response:
        """A worker is still at it."""
        number, claim, document = await self._own(request)
        counts = [number_in(document, name, 0) for name in ("rows", "batches_done", "batches")]
        beat = self._service.jobs.beat
        return _of_job(await self._service.in_state(beat, number, claim, *counts))

    async def ended(self, request: Request) -> Response:
        """A worker has finished ("done"), or cannot do it ("failed"), as the address says."""
        number, claim, document = await self._own(request)
        state = request.url.path.rpartition("/")[2]
        rows, message = number_in(document, "rows", 0), text_in(document, "message", "")
        end = self._service.jobs.end
        return _of_job(await self._service.in_state(end, number, claim, state, rows, message))

    async def release(self, request: Request) -> Response:
        """A worker has to stop: somebody else shall do it."""
        number, claim, _ = await self._own(request)
        return _of_job(await self._service.in_state(self._service.jobs.give_back, number, claim))

    async def workers(self, request: Request) -> Response:
        """Who has asked for jobs."""
        workers = self._service.jobs.workers
        body = await self._service.state_body(
            "workers",
            lambda: document_text({"workers": [_listed(*pair) for pair in workers()]}),
        )
        return streamed(request, body, "application/json")

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


def _listed(worker: Worker, seen: float) -> dict[str, Any]:
    known = {**worker._asdict(), "libraries": dict(worker.libraries)}
    return {**known, "seen_at": at(seen).isoformat(timespec="seconds")}


def _of_job(job: Job, status: int = 200) -> Response:
    return answer({"job": job.as_document()}, status)
