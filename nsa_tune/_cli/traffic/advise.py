"""The command `advise`: how to launch an engine for some traffic."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import print_document
from nsa_tune._cli.shared.option_groups import grouped
from nsa_tune._cli.shared.options import AsJson, Engine
from nsa_tune._cli.traffic.options import EngineOptions, PricingOptions
from nsa_tune._errors import UsageError
from nsa_tune.reports.formats.plain import plain
from nsa_tune.reports.traffic.advice import advise as advised
from nsa_tune.reports.traffic.advice import other_format
from nsa_tune.reports.traffic.answer import lines


@grouped
def advise(
    engine: Annotated[Engine, typer.Option("--engine", help="Engine to advise.")] = Engine.SGLANG,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Trace of the requests to be served.")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Decision log (NSA_TUNE_LOG) of an engine, instead of a trace."),
    ] = None,
    *,
    options: EngineOptions,
    table: PricingOptions,
    json: AsJson = False,
) -> None:
    """Say how to launch an engine for a trace, and what that gives.

    Prints the command, what changes against the flags in use, times to first token, tokens a
    second, memory, and what the plug-in adds.
    """
    if trace is not None and log is not None:
        raise UsageError("give --trace or --log, not both")
    deployment = table.deployment(engine, options)
    other = partial(table.deployment, engine, options, kv_dtype=other_format(deployment))
    found = advised(deployment, options.traffic(trace, log), other if trace is not None else None)
    if json:
        print_document(found.document())
        return
    for line in lines(found):
        typer.echo(plain(line))
