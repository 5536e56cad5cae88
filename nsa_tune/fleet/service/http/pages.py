"""What a browser sees: what is being measured, the tables and their reports, and the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nsa_tune._errors import StoreError
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Key
from nsa_tune.db.reader import table_in
from nsa_tune.fleet.service.http.messages import answer, streamed
from nsa_tune.fleet.service.jobs.job import Job, Worker, at
from nsa_tune.fleet.service.service import Service
from nsa_tune.fleet.service.tables.index import Entry, Held
from nsa_tune.reports.analysis.report import build
from nsa_tune.reports.dashboard.watched_files import NO_REPORT
from nsa_tune.reports.formats.display_tables import DisplayTable, minute
from nsa_tune.reports.html.frame import Frame, linked, served_asset
from nsa_tune.reports.html.markup import heading, html_table
from nsa_tune.reports.html.page import written

if TYPE_CHECKING:
    from starlette.requests import Request

_FRAME = Frame(
    '<meta http-equiv="refresh" content="10">\n<link rel="stylesheet" href="assets/page.css">',
    end="", has_charts=False,
)  # fmt: skip


class Pages:
    """The pages, what they load, and what monitors read."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def overview(self, request: Request) -> Response:
        """Running jobs, and every table with a link to its report."""
        held, jobs, demand = await self._service.held(), self._service.jobs, self._service.demand
        body = await self._service.state_body(
            "overview",
            lambda: _overview(held, jobs.all("running"), demand.doubtful()),
            held.version,
        )
        return streamed(request, body, "text/html")

    async def queue(self, request: Request) -> Response:
        """Jobs and workers."""
        jobs = self._service.jobs
        body = await self._service.state_body("queue", lambda: _queue(jobs.all(), jobs.workers()))
        return streamed(request, body, "text/html")

    async def report(self, request: Request) -> Response:
        """The report of one table, as `nsa-tune report` writes it."""
        digest = request.path_params["digest"]
        for entry in (await self._service.held()).entries:
            if entry.key.digest == digest:
                make = partial(_write_report, self._service.database, entry.key)
                body = await self._service.large_body(f"report of {digest}", entry.version, make)
                return streamed(request, body, "text/html")
        raise HTTPException(404, f"there is no table {digest[:40]}")

    async def asset(self, request: Request) -> Response:
        """A style or a script."""
        name = request.path_params["name"]
        if (found := served_asset(name)) is None:
            raise HTTPException(404, "there is no such file")
        make, kind = found
        body = await self._service.body(
            f"asset {name}", "", lambda into: into.write_text(make(), "utf-8")
        )
        return streamed(request, body, kind)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        del request
        text = await self._service.in_state(self._service.metrics_text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def health(self, request: Request) -> Response:
        """That it answers; nothing else, as it needs no token."""
        del request
        return answer({"ok": True})


def _page(title: str, link: str, words: str, cards: Sequence[str]) -> str:
    header = f'<header><h1>{title}</h1>\n<p><a href="{link}">{words}</a></p></header>'
    return _FRAME.page(f"nsa-tune: {title}", header, cards, None)


def _overview(held: Held, running: Sequence[Job], doubtful: Mapping[str, Sequence[str]]) -> str:
    counts = f"{counted(len(held.entries), 'table')}, {counted(held.measurements, 'measurement')}"
    note = "" if held.entries else (
        "Nothing is measured yet. What `nsa-tune job add` queues, `nsa-tune worker` measures."
    )  # fmt: skip
    cards = [_card(_jobs(running, "Being measured"))] if running else []
    names = ("GPU", "model", "heads", "KV layout", "driver", "rows", "measured", "doubted points")
    entries = held.entries
    listed = tuple(_row(entry, doubtful.get(entry.key.digest, ())) for entry in entries)
    table = DisplayTable("Tables", names if listed else (), listed, note=note)
    links = [f"report/{entry.key.digest}" for entry in entries]
    return _page(counts, "queue", "Jobs and workers", [*cards, _card(table, links)])


def _row(entry: Entry, doubtful: Sequence[str]) -> tuple[str, ...]:
    key = entry.key
    return (
        key.gpu, key.model, str(key.heads), key.kv_layout, key.driver, str(entry.measurements),
        minute(entry.measured_at), ", ".join(doubtful),
    )  # fmt: skip


def _progress(job: Job) -> str:
    if not job.batches:
        return "starting"
    share = 100 * job.batches_done // job.batches
    return f"{job.batches_done} of {job.batches} batches ({share} %)"


def _queue(jobs: Sequence[Job], workers: Sequence[tuple[Worker, float]]) -> str:
    cards = _card(_jobs(jobs)), _card(_workers(workers))
    return _page("Jobs and workers", ".", "The tables", cards)


def _jobs(jobs: Sequence[Job], title: str = "Jobs") -> DisplayTable:
    rows = tuple(
        (
            str(job.number), job.state, _what(job), job.reason, job.created_by,
            job.worker or "", _progress(job) if job.state == "running" else "", str(job.rows),
            _time(job.heard), job.message,
        )
        for job in jobs
    )  # fmt: skip
    columns = ("job", "state", "table", "why", "asked by", "worker", "progress", "rows",
               "last heard", "what its worker said")  # fmt: skip
    note = "" if rows else "There are none yet. A job is proposed when a table is missing."
    return DisplayTable(title, columns, rows, frozenset({0, 7}), note)


def _what(job: Job) -> str:
    target = job.target
    points = f", {', '.join(job.points)} only" if job.points else ""
    return f"{target.gpu}, {target.model}, {target.heads} heads, {target.kv_layout}{points}"


def _workers(workers: Sequence[tuple[Worker, float]]) -> DisplayTable:
    rows = tuple(
        (
            worker.name, worker.gpu, worker.driver, _time(seen),
            ", ".join(f"{name} {version}" for name, version in worker.libraries),
        )
        for worker, seen in workers
    )  # fmt: skip
    columns = ("worker", "GPU", "driver", "last asked", "libraries")
    note = "" if rows else "None has asked within a week."
    return DisplayTable("Workers", columns, rows, note=note)


def _card(table: DisplayTable, links: Sequence[str] = ()) -> str:
    body = html_table(table, links) if table.rows else ""
    return f"<article>{heading(table)}{body}</article>"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else minute(at(seconds).isoformat())


def _write_report(path: Path, key: Key, into: Path) -> None:
    """Write the page of the table of `key` in the database `path`."""
    frame = replace(linked("../assets/"), extra='<p><a href="..">All tables</a></p>')
    try:
        page = written(build([table_in(path, key)]), frame)
        into.write_text(page, "utf-8", "backslashreplace")
    except NO_REPORT as error:
        raise StoreError(f"there is no report of {key.digest}: {error}") from error
