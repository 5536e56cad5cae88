"""The service as an ASGI application: which address answers what, to whom."""

from __future__ import annotations

import json
import logging
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from nsa_tune._errors import NoTunedData, NsaTuneError, StoreError, UsageError
from nsa_tune.fleet.service.auth.gate import Endpoint, Gate
from nsa_tune.fleet.service.auth.tokens import Role
from nsa_tune.fleet.service.http.host_endpoints import HostEndpoints
from nsa_tune.fleet.service.http.job_endpoints import JobEndpoints
from nsa_tune.fleet.service.http.pages import Pages
from nsa_tune.fleet.service.http.table_endpoints import TableEndpoints
from nsa_tune.fleet.service.jobs.queue import JobLost, TooManyJobs
from nsa_tune.fleet.service.service import Busy, Service
from nsa_tune.reports.dashboard.access import sealed

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

_log = logging.getLogger(__name__)

_STATUSES: tuple[tuple[type[NsaTuneError], int], ...] = (
    (JobLost, 409),
    (TooManyJobs, 429),
    (UsageError, 400),
    (NoTunedData, 404),
    (StoreError, 503),
)
_RETRY_AFTER_S = {Busy: 5, TooManyJobs: 3600}  # fmt: skip
_BETWEEN_LINES_S = 60.0
"""From one line in the log to the next: visitors must not fill it."""
_SENTENCES = {404: "there is nothing at this address", 405: "this address takes another method"}


def application(service: Service) -> ASGIApp:
    """The whole service. Every address but /healthz needs a token."""
    gate = Gate(service.tokens)
    tables, hosts = TableEndpoints(service), HostEndpoints(service)
    jobs, pages = JobEndpoints(service), Pages(service)
    answers = _Answers(service)

    def route(path: str, method: str, endpoint: Endpoint, role: Role) -> Route:
        return answers.route(path, method, gate.guarded(endpoint, role))

    job = "/v1/jobs/{number}"
    routes = [
        route("/v1/database", "GET", tables.database, Role.READ),
        route("/v1/tables", "GET", tables.tables, Role.READ),
        route("/v1/tables", "POST", tables.upload, Role.SUBMIT),
        route("/v1/tables/{version}", "GET", tables.table, Role.READ),
        route("/v1/weights", "GET", hosts.weights, Role.READ),
        route("/v1/weights/forget", "POST", hosts.forget, Role.ADMIN),
        route("/v1/decisions", "POST", hosts.decisions, Role.SUBMIT),
        route("/v1/findings", "POST", hosts.findings, Role.SUBMIT),
        route("/v1/wanted", "POST", hosts.wanted, Role.READ),
        route("/v1/workers", "GET", jobs.workers, Role.READ),
        route("/v1/jobs", "GET", jobs.jobs, Role.READ),
        route("/v1/jobs", "POST", jobs.create, Role.ADMIN),
        route("/v1/jobs/cancel", "POST", jobs.cancel_proposals, Role.ADMIN),
        route("/v1/jobs/claim", "POST", jobs.claim, Role.SUBMIT),
        route(f"{job}/approve", "POST", jobs.approve, Role.ADMIN),
        route(f"{job}/cancel", "POST", jobs.cancel, Role.ADMIN),
        route(f"{job}/beat", "POST", jobs.beat, Role.SUBMIT),
        route(f"{job}/done", "POST", jobs.ended, Role.SUBMIT),
        route(f"{job}/failed", "POST", jobs.ended, Role.SUBMIT),
        route(f"{job}/release", "POST", jobs.release, Role.SUBMIT),
        route("/metrics", "GET", pages.metrics, Role.READ),
        answers.route("/healthz", "GET", pages.health),
        answers.route("/", "GET", gate.guarded_page(pages.overview)),
        answers.route("/queue", "GET", gate.guarded_page(pages.queue)),
        answers.route("/report/{digest}", "GET", gate.guarded_page(pages.report)),
        answers.route("/assets/{name}", "GET", gate.guarded_page(pages.asset)),
    ]
    return sealed(Starlette(routes=routes, exception_handlers={HTTPException: _unrouted}))


class _Answers:
    """Makes an answer of whatever an endpoint comes to, and counts it."""

    def __init__(self, service: Service) -> None:
        self._metrics = service.metrics
        self._folder = f"{service.database.absolute().parent}/"
        self._quiet_until = 0.0

    def route(self, path: str, method: str, endpoint: Endpoint) -> Route:
        """A route whose errors are sentences."""
        return Route(path, self._answered(path, endpoint), methods=[method])

    def _answered(self, path: str, endpoint: Endpoint) -> Endpoint:
        async def answered(request: Request) -> Response:
            begin = perf_counter()
            try:
                response = await endpoint(request)
            except (HTTPException, NsaTuneError) as error:
                response = self._refusal(error)
            except ClientDisconnect:
                response = _error(400, "the body has no end")
            except OSError as error:
                response = self._refusal(StoreError(f"a file cannot be written: {error.strerror}"))
            self._metrics.seconds.labels(path).observe(perf_counter() - begin)
            self._metrics.requests.labels(request.method, path, response.status_code).inc()
            return response

        return answered

    def _refusal(self, error: HTTPException | NsaTuneError) -> Response:
        if isinstance(error, HTTPException):
            return _error(error.status_code, error.detail, error.headers)
        status = next((code for kind, code in _STATUSES if isinstance(error, kind)), 500)
        if status >= 500 and not isinstance(error, Busy) and monotonic() >= self._quiet_until:
            self._quiet_until = monotonic() + _BETWEEN_LINES_S
            _log.warning("%s", error)
        # Where files lie does not concern a visitor.
        after = _RETRY_AFTER_S.get(type(error))
        headers = None if after is None else {"retry-after": str(after)}
        return _error(status, str(error).replace(self._folder, ""), headers)


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = _SENTENCES.get(error.status_code, error.detail)
    return _error(error.status_code, f"{sentence}: {request.url.path}", error.headers)


def _error(status: int, sentence: str, headers: object = None) -> Response:
    more = dict(headers) if isinstance(headers, dict) else {}
    text = json.dumps({"error": sentence}, ensure_ascii=False)
    return Response(
        text.encode("utf-8", "backslashreplace"), status, {**more, "cache-control": "no-store"},
        "application/json",
    )  # fmt: skip
