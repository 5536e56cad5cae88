"""The dashboard as an ASGI application: the page, its assets, and JSON.

It answers to this machine's names alone: a hostile page could point its own at 127.0.0.1. Others
see it through `ssh -L`; who serves tables to others takes the service.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import Response
from starlette.routing import Route

from nsa_tune.reports.dashboard.access import sealed, tag_headers, unchanged
from nsa_tune.reports.dashboard.shipped_tables import BACK, listing, shipped_report
from nsa_tune.reports.dashboard.watched_files import WatchedFiles
from nsa_tune.reports.formats.json_document import as_json
from nsa_tune.reports.html.frame import Frame, linked, served_asset
from nsa_tune.reports.html.page import written

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp


def application(paths: list[Path]) -> ASGIApp:
    """The dashboard over `paths`, databases and text tables, which it never writes."""
    pages = _Pages(WatchedFiles(paths))
    routes = [
        Route("/", pages.page),
        Route("/assets/{name}", pages.asset),
        Route("/api/live", pages.live),
        Route("/api/report", pages.report),
    ]
    app = Starlette(routes=routes)
    return sealed(TrustedHostMiddleware(app, ["localhost", "127.0.0.1"], www_redirect=False))


class _Body(NamedTuple):
    """What is sent, with its tag."""

    data: bytes
    tag: str

    @classmethod
    def of(cls, text: str) -> _Body:
        data = text.encode("utf-8", "backslashreplace")
        return cls(data, hashlib.sha256(data).hexdigest()[:32])


class _Pages:
    """The responses. Files are read and reports made in threads, not on the event loop, and each
    body is made once for a state of the files: a queue of visitors costs one."""

    def __init__(self, watched: WatchedFiles) -> None:
        self._watched = watched
        self._bodies: dict[str, tuple[str, Any]] = {}
        self._making: dict[str, asyncio.Lock] = {}

    async def _made(self, name: str, make: Callable[[str], Any]) -> Any:
        """What `make` makes of the present state."""
        # One at a time: the others wait without a thread, and find what was made meanwhile.
        async with self._making.setdefault(name, asyncio.Lock()):
            state = await run_in_threadpool(lambda: self._watched.state)
            cached = self._bodies.get(name)
            if cached is None or cached[0] != state:
                cached = self._bodies[name] = state, await run_in_threadpool(make, state)
            return cached[1]

    async def page(self, request: Request) -> Response:
        """The report with the state of runs on top; `?table=NAME`: that of a shipped table."""
        name = request.query_params.get("table")
        if name is None:
            return _response(request, await self._made("page", self._written), "text/html")
        report = await run_in_threadpool(shipped_report, name)
        if report is None:
            return Response("no table of this name ships\n", 404, media_type="text/plain")

        def made(state: str) -> _Body:
            frame = _frame(state)
            return _Body.of(written(report, replace(frame, extra=BACK + frame.extra)))

        return _response(request, await self._made(f"table {name}", made), "text/html")

    def _written(self, state: str) -> _Body:
        report = self._watched.report()
        listed = listing(folded=bool(report.sections))
        return _Body.of(written(report, replace(_frame(state), after=listed)))

    async def asset(self, request: Request) -> Response:
        """A style or a script."""
        if (found := served_asset(request.path_params["name"])) is None:
            return Response("there is no such file\n", 404, media_type="text/plain")
        make, kind = found
        return _response(request, _Body.of(await run_in_threadpool(make)), kind)

    async def live(self, request: Request) -> Response:
        """Runs, newest measurements and failures."""
        body = await self._made("live", lambda _: _json(self._watched.live()))
        return _response(request, body, "application/json")

    async def report(self, request: Request) -> Response:
        """The report as `nsa-tune report --json` prints it."""
        body = await self._made("report", lambda _: _Body.of(as_json(self._watched.report())))
        return _response(request, body, "application/json")


def _frame(state: str) -> Frame:
    live = f'<section id="live" data-state="{escape(state)}" aria-label="Runs"></section>'
    return replace(linked("assets/", "live.css", "live.js"), extra=live)


def _json(document: dict[str, Any]) -> _Body:
    # A stranger's database may hold numbers that are infinite, which JSON cannot express, and bytes
    # where texts are expected.
    finite = json.loads(json.dumps(document, default=repr), parse_constant=lambda _: None)
    return _Body.of(json.dumps(finite, ensure_ascii=False))


def _response(request: Request, body: _Body, media_type: str) -> Response:
    """`body`, or 304 if the browser already has it."""
    answer = Response(body.data, headers=tag_headers(body.tag), media_type=media_type)
    return unchanged(request, body.tag) or answer
