"""The dashboard as an ASGI application: the page, its assets, and JSON."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.routing import Route

from nsa_tune._errors import ExtraMissing
from nsa_tune.reports.dashboard.access import Gate
from nsa_tune.reports.dashboard.watched_files import WatchedFiles
from nsa_tune.reports.formats.json_document import as_json
from nsa_tune.reports.html.markup import asset
from nsa_tune.reports.html.page import Frame, written
from nsa_tune.reports.html.vega_bundle import charts_javascript

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

__all__ = ["application"]

_SCHEMA = "nsa-tune/measurements/1"
_TYPES = {".css": "text/css", ".js": "text/javascript"}


def application(paths: list[Path], *, token: str | None = None) -> ASGIApp:
    """The dashboard over `paths`, databases and text tables, which it never writes.

    With a `token` every request needs it. Without one, only requests to localhost are served.
    """
    pages = _Pages(WatchedFiles(paths))
    routes = [
        Route("/", pages.page),
        Route("/assets/{name}", pages.asset),
        Route("/api/live", pages.live),
        Route("/api/report", pages.report),
        Route("/api/measurements", pages.measurements),
    ]
    return Gate(Starlette(routes=routes), token)


class _Pages:
    """The responses. Files are read and reports made in threads, not on the event loop."""

    def __init__(self, watched: WatchedFiles) -> None:
        self._watched = watched
        self._page: tuple[str, str] = ("", "")

    async def page(self, request: Request) -> Response:
        """The report as a page, with the state of runs on top."""
        html = await run_in_threadpool(self._written)
        return _response(request, html.encode(), "text/html")

    def _written(self) -> str:
        state, html = self._page
        now = self._watched.state
        if state != now:
            has_charts = "charts.js" in _assets()
            html = written(self._watched.report(), _frame(now, has_charts=has_charts))
            self._page = now, html
        return html

    async def asset(self, request: Request) -> Response:
        """A style or a script."""
        name = request.path_params["name"]
        text = (await run_in_threadpool(_assets)).get(name)
        if text is None:
            return Response("there is no such file\n", 404, media_type="text/plain")
        return _response(request, text.encode(), _TYPES[Path(name).suffix])

    async def live(self, request: Request) -> Response:
        """Runs, newest measurements and failures."""
        document = await run_in_threadpool(self._watched.live)
        return _json(request, document)

    async def report(self, request: Request) -> Response:
        """The report as `nsa-tune report --json` prints it."""
        text = await run_in_threadpool(lambda: as_json(self._watched.report()))
        return _response(request, text.encode(), "application/json")

    async def measurements(self, request: Request) -> Response:
        """The newest measurement of each cell, by table; `?key=DIGEST` selects one table."""
        wanted = request.query_params.get("key", "")
        found = await run_in_threadpool(self._watched.tables)
        document: dict[str, Any] = {
            "schema": _SCHEMA,
            "tables": [
                {
                    "source": table.source,
                    "digest": table.key.digest,
                    "key": {**asdict(table.key), "libraries": dict(table.key.libraries)},
                    "measured_at": table.measured_at,
                    "measurements": [asdict(row) for row in table.measurements],
                }
                for table in found
                if table.key.digest.startswith(wanted)
            ],
        }
        return _json(request, document)


@cache
def _assets() -> dict[str, str]:
    """Name to text of the files that the page loads; charts.js only if vl-convert is installed."""
    found = {name: asset(name) for name in ("page.css", "page.js", "live.css", "live.js")}
    with suppress(ExtraMissing):
        found["charts.js"] = charts_javascript()
    return found


def _frame(state: str, *, has_charts: bool) -> Frame:
    scripts = [*(["charts.js"] if has_charts else []), "page.js", "live.js"]
    return Frame(
        head='<link rel="stylesheet" href="assets/page.css">\n'
        '<link rel="stylesheet" href="assets/live.css">',
        end="\n".join(f'<script src="assets/{name}"></script>' for name in scripts),
        has_charts=has_charts,
        extra=f'<section id="live" data-state="{escape(state)}" aria-label="Runs"></section>',
    )


def _json(request: Request, document: dict[str, Any]) -> Response:
    # The error of a wrong result may be infinite, which JSON cannot express.
    text = json.dumps(_finite(document), ensure_ascii=False, allow_nan=False)
    return _response(request, text.encode("utf-8", "backslashreplace"), "application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def _response(request: Request, body: bytes, media_type: str) -> Response:
    """`body`, or 304 if the browser already has it."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"etag": tag, "cache-control": "private, no-cache"}
    known = [one.strip().removeprefix("W/") for one in
             request.headers.get("if-none-match", "").split(",")]  # fmt: skip
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)
