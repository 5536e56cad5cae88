"""The queue as a page beside the dashboard: jobs, workers, and tables that are doubted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from nsa_tune.fleet.service.jobs.job import Job, Worker
from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.html.markup import heading, html_table

LINK = '<p><a href="queue">Jobs and workers</a></p>'
"""What leads to the page from the dashboard."""
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="10">
<title>nsa-tune: jobs and workers</title>
<link rel="stylesheet" href="assets/page.css">
</head>
<body>
<header><h1>Jobs and workers</h1><p><a href=".">The tables</a></p></header>
<main id="main">
"""
_END = "</main>\n</body>\n</html>\n"


def queue_page(
    jobs: Sequence[Job],
    workers: Sequence[tuple[Worker, float]],
    doubtful: Mapping[str, Sequence[str]],
) -> str:
    """The page; texts that somebody sent are escaped."""
    shown = [_jobs(jobs), _workers(workers)]
    if doubtful:
        shown.append(_doubtful(doubtful))
    cards = [f"<article>{heading(one)}{html_table(one)}</article>\n" for one in shown]
    return "".join([_HEAD, *cards, _END])


def _jobs(jobs: Sequence[Job]) -> DisplayTable:
    rows = [
        (
            str(job.number), job.state, job.target.gpu, job.target.model, str(job.target.heads),
            job.target.kv_layout, ", ".join(job.points) or "all", job.reason, str(job.asked),
            job.worker or "", str(job.rows), job.message,
        )
        for job in jobs
    ]  # fmt: skip
    columns = (
        "job", "state", "GPU", "model", "heads", "KV layout", "points", "why", "asked", "worker",
        "rows", "what its worker said",
    )  # fmt: skip
    note = "" if rows else "There are none yet. A job is proposed when a table is missing."
    return DisplayTable("Jobs", columns, tuple(rows), frozenset({0, 4, 8, 10}), note)


def _workers(workers: Sequence[tuple[Worker, float]]) -> DisplayTable:
    rows = [
        (
            worker.name, worker.gpu, worker.driver,
            ", ".join(f"{name} {version}" for name, version in worker.libraries),
            datetime.fromtimestamp(seen, UTC).isoformat(sep=" ", timespec="seconds"),
        )
        for worker, seen in workers
    ]  # fmt: skip
    columns = ("worker", "GPU", "driver", "libraries", "last asked")
    note = "" if rows else "None has asked yet."
    return DisplayTable("Workers", columns, tuple(rows), note=note)


def _doubtful(doubtful: Mapping[str, Sequence[str]]) -> DisplayTable:
    rows = tuple((digest, ", ".join(points)) for digest, points in doubtful.items())
    return DisplayTable("Tables that are doubted", ("key", "points"), rows)
