"""Commands that answer for one batch: `lookup` what the plan is, `explain` why."""

from __future__ import annotations

from pathlib import Path

import typer

from nsa_tune._cli import answers
from nsa_tune._cli.options import (
    AsJson,
    BatchWord,
    Captured,
    Database,
    Extend,
    Gpu,
    Heads,
    KvDtype,
    KvDtypeOption,
    Model,
    Prefix,
    Strict,
    batch_of,
    heads_of,
    model_of,
)
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.hardware import detect
from nsa_tune.reports.output.plain import plain

__all__ = ["dispatcher_for", "explain", "lookup"]


def lookup(
    batch: BatchWord = None,
    prefix: Prefix = None,
    extend: Extend = None,
    captured: Captured = False,
    gpu: Gpu = None,
    model: Model = None,
    heads: Heads = None,
    kv_dtype: KvDtypeOption = None,
    database: Database = None,
    strict: Strict = False,
    json: AsJson = False,
) -> None:
    """Print the plan for one batch: every decision that an engine would read.

    Without a table for the key the engine's own rule answers, and stderr says so.
    """
    asked = batch_of(batch, prefix, extend, captured)
    dispatcher = dispatcher_for(gpu, model, heads, kv_dtype, database, strict)
    plan = dispatcher.plan(asked)
    if json:
        typer.echo(answers.as_text(answers.looked_up(dispatcher, plan)))
        return
    for name, value in answers.decisions(plan).items():
        if value is not None:
            typer.echo(f"{name} = {value}")


def explain(
    batch: BatchWord = None,
    prefix: Prefix = None,
    extend: Extend = None,
    captured: Captured = False,
    gpu: Gpu = None,
    model: Model = None,
    heads: Heads = None,
    kv_dtype: KvDtypeOption = None,
    database: Database = None,
    strict: Strict = False,
    json: AsJson = False,
) -> None:
    """Say why the plan for one batch is what it is: estimates, intervals, limits and sources."""
    asked = batch_of(batch, prefix, extend, captured)
    dispatcher = dispatcher_for(gpu, model, heads, kv_dtype, database, strict)
    if json:
        typer.echo(answers.as_text(answers.explained(dispatcher, dispatcher.plan(asked))))
    else:
        for line in dispatcher.explain(asked).splitlines():
            typer.echo(plain(line))


def dispatcher_for(
    gpu: str | None,
    model: str | None,
    heads: int | None,
    kv_dtype: KvDtype | None,
    database: Path | None,
    strict: bool,
) -> Dispatcher:
    """The dispatcher for what a command line names; the rest is this machine's.

    Raises:
        UsageError: as `Dispatcher.open`.
        NoTunedData: as `Dispatcher.open`, when `strict`.
    """
    gpu = gpu or detect.local_device_name()
    model = model_of(model, gpu)
    return Dispatcher.open(
        database,
        gpu,
        model=model,
        heads=heads_of(heads, model),
        kv_dtype=str(kv_dtype or KvDtype.FP8),
        strict=strict,
    )
