"""The commands `job ...`: a service's queue, and how often batches ran."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from nsa_tune._cli.fleet.remote import UrlOption, client_of
from nsa_tune._cli.shared.console import print_document, say
from nsa_tune._cli.shared.gpus import name_for_job
from nsa_tune._cli.shared.option_groups import ModelOptions, grouped
from nsa_tune._cli.shared.options import AsJson, heads_of, model_of, names_of
from nsa_tune._errors import UsageError
from nsa_tune.backend.dispatch.matching import Here
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.types.counted import counted
from nsa_tune.remote.client import reading
from nsa_tune.reports.formats.plain import plain

_PATIENCE_S = 10.0

job = typer.Typer(
    help="Jobs of a service, and how often batches ran.",
    no_args_is_help=True,
)

_Number = Annotated[int, typer.Argument(min=1, help="Number of the job, as `job list` shows it.")]


_Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help="GPU: its name, or a part of it, H200. Default: this machine's."),
]


@job.command("list")
def job_list(
    url: UrlOption = None,
    state: Annotated[
        str,
        typer.Option(
            "--state", help="Only these: proposed, queued, running, done, failed or cancelled."
        ),
    ] = "",
    json: AsJson = False,
) -> None:
    """List the newest jobs of a service."""
    query = f"?{urlencode({'state': state})}" if state else ""
    answer = client_of(url, _PATIENCE_S).document(f"/v1/jobs{query}")
    if json:
        print_document({"schema": "nsa-tune/jobs/1", **answer})
        return
    with reading():
        lines = [_line(job) for job in answer["jobs"]]
    for line in lines:
        typer.echo(line)


@job.command("add")
@grouped
def job_add(
    *,
    gpu: _Gpu = None,
    model: ModelOptions,
    points: Annotated[
        str, typer.Option("--points", help="Decision points, comma-separated, or all.")
    ] = "all",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what the service has already.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option("--budget", min=1, help="Start no new batch after so many seconds."),
    ] = None,
    url: UrlOption = None,
) -> None:
    """Add a job; it is queued without a further approval."""
    body = _table_of(_named(gpu), model) | {
        "fresh": fresh, "budget_s": budget, "points": list(names_of("--points", points)),
    }  # fmt: skip
    _print(client_of(url, _PATIENCE_S).post("/v1/jobs", body))


@job.command("ask")
@grouped
def job_ask(
    *,
    gpu: _Gpu = None,
    model: ModelOptions,
    url: UrlOption = None,
    json: AsJson = False,
) -> None:
    """Ask for a table. If there is none, the service proposes a job that makes it.

    For the device of this machine, the table is for the driver and libraries installed here.
    """
    name = _named(gpu)
    body = _table_of(name, model)
    here = Here.of(name)
    if here is not None:
        body |= {"driver": here.driver, "libraries": dict(here.libraries)}
    answer = client_of(url, _PATIENCE_S).post("/v1/wanted", body)
    if json:
        print_document({"schema": "nsa-tune/wanted/1", **answer})
        return
    with reading():
        table = answer["table"]
        line = f"there is a table: {table}" if table else _line(answer["job"])
    typer.echo(line)


@job.command("approve")
def job_approve(number: _Number, url: UrlOption = None) -> None:
    """Queue a job that was proposed."""
    _print(client_of(url, _PATIENCE_S).post(f"/v1/jobs/{number}/approve", {}))


@job.command("cancel")
def job_cancel(
    number: Annotated[
        int | None, typer.Argument(min=1, help="Number of the job.", show_default=False)
    ] = None,
    by: Annotated[
        str | None,
        typer.Option("--by", help="End all that this token proposed and no worker has begun."),
    ] = None,
    url: UrlOption = None,
) -> None:
    """End a job. Its worker stops after the current batch; what it measured is kept."""
    if (number is None) == (by is None):
        raise UsageError("give the number of a job, or --by and the name of a token")
    client = client_of(url, _PATIENCE_S)
    if by is None:
        _print(client.post(f"/v1/jobs/{number}/cancel", {}))
    else:
        _print_count(client.post("/v1/jobs/cancel", {"by": by}), "cancelled", "job")


@job.command("forget")
def job_forget(
    by: Annotated[
        str, typer.Option("--by", help="Of tables that logs of this token made known.")
    ] = "",
    gpu: Annotated[str, typer.Option("--gpu", help="Of this GPU.")] = "",
    url: UrlOption = None,
) -> None:
    """Forget how often batches ran, which decision logs had told."""
    if not (by or gpu):
        raise UsageError("say whose: --by TOKEN, --gpu GPU, or both")
    answer = client_of(url, _PATIENCE_S).post("/v1/weights/forget", {"by": by, "gpu": gpu})
    _print_count(answer, "tables", "table")


def _named(gpu: str | None) -> str:
    return name_for_job(gpu) if gpu else detect.local_device_name()


def _table_of(gpu: str, model: ModelOptions) -> dict[str, Any]:
    """The fields that name a table."""
    profile = model_of(model.model, gpu)
    return {
        "gpu": gpu, "model": profile, "heads": heads_of(model.heads, profile),
        "kv_dtype": str(model.kv_dtype),
    }  # fmt: skip


def _print_count(answer: dict[str, Any], name: str, noun: str) -> None:
    with reading():
        say(f"{counted(int(answer[name]), noun)}: done")


def _print(answer: dict[str, Any]) -> None:
    with reading():
        line = _line(answer["job"])
    say(line)


def _line(one: dict[str, Any]) -> str:
    what = f"{one['gpu']}, {one['model']}, {one['heads']} local heads, {one['kv_layout']}"
    points = ",".join(one["points"]) or "all points"
    by = f" by {one['worker']}" if one["worker"] else ""
    end = f": {one['message']}" if one["message"] else ""
    return plain(f"{one['id']}  {one['state']}{by}  {what}, {points} ({one['reason']}){end}")
