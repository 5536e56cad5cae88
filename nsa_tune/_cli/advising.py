"""The command `advise`: what a table says about the settings that an engine already has."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli import answers
from nsa_tune._cli.asking import dispatcher_for
from nsa_tune._cli.options import (
    AsJson,
    Database,
    Engine,
    Gpu,
    Heads,
    KvDtypeOption,
    Model,
    Strict,
)
from nsa_tune.backend.decision_log import read_decisions
from nsa_tune.reports.advise import advise as advised
from nsa_tune.reports.plain import plain

__all__ = ["advise"]


def advise(
    engine: Annotated[Engine, typer.Option("--engine", help="Engine to advise.")] = Engine.SGLANG,
    version: Annotated[
        str | None, typer.Option("--engine-version", help="Its release; default: the newest known.")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Decision log (NSA_TUNE_LOG) to weight the batches by."),
    ] = None,
    gpu: Gpu = None,
    model: Model = None,
    heads: Heads = None,
    kv_dtype: KvDtypeOption = None,
    database: Database = None,
    strict: Strict = False,
    json: AsJson = False,
) -> None:
    """Print the engine's own flags and variables that a table speaks for, as shell lines.

    Each with what it gains, how sure that is, and what it loses against the whole table.
    """
    del engine  # there is one
    batches = None if log is None else [(one.batch, one.count) for one in read_decisions(log)]
    dispatcher = dispatcher_for(gpu, model, heads, kv_dtype, database, strict)
    found = advised(dispatcher, version, batches)
    if json:
        typer.echo(answers.as_text({"schema": "nsa-tune/advise/1", **asdict(found)}))
        return
    for line in found.shell():
        typer.echo(plain(line))
