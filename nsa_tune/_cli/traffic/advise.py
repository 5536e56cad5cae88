"""The command `advise`: values for the options that an engine already has."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import print_document
from nsa_tune._cli.shared.option_groups import DispatcherOptions, grouped
from nsa_tune._cli.shared.options import AsJson, Engine
from nsa_tune._cli.traffic.configurations import ComparedOptions, compared, shell_lines
from nsa_tune._cli.traffic.options import TrafficOptions, release_named
from nsa_tune._cli.traffic.replaying import logged
from nsa_tune._errors import UsageError
from nsa_tune.reports.advice.sglang import advise as advise_sglang
from nsa_tune.reports.advice.vllm import advise as advise_vllm
from nsa_tune.reports.formats.plain import plain
from nsa_tune.reports.replay.configurations import Configurations


@grouped
def advise(
    engine: Annotated[Engine, typer.Option("--engine", help="Engine to advise.")] = Engine.SGLANG,
    version: Annotated[
        str | None,
        typer.Option("--engine-version", help="Release of the engine. Default: the newest known."),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            help="Decision log (NSA_TUNE_LOG); its batches count as often as they occurred.",
        ),
    ] = None,
    eager_prefill: Annotated[
        bool,
        typer.Option("--eager-prefill", help="SGLang runs prefills without CUDA graphs."),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Trace of requests: rank whole configurations by the time that it takes.",
        ),
    ] = None,
    *,
    options: ComparedOptions,
    traffic: TrafficOptions,
    table: DispatcherOptions,
    json: AsJson = False,
) -> None:
    """Print values for the engine's own flags and environment variables, as shell lines.

    Each comes with its gain over the default, how sure that is, and what deciding for each batch
    would gain on top. With --trace, whole configurations are ranked.
    """
    if trace is not None:
        if log is not None:
            raise UsageError("give --trace or --log, not both")
        if engine is Engine.VLLM:
            raise UsageError("--trace ranks configurations of SGLang; leave out --engine vllm")
        _rank(compared(trace, table, traffic, options, release_named(version)), json)
        return
    dispatcher = table.open()
    batches = None if log is None else logged(log, dispatcher)
    if engine is Engine.VLLM:
        whole = table.open(heads=dispatcher.setting.profile.heads)
        found = advise_vllm(dispatcher, version, batches, whole=whole)
    else:
        found = advise_sglang(dispatcher, version, batches, eager_prefill=eager_prefill)
    if json:
        print_document({"schema": "nsa-tune/advise/2", **asdict(found)})
        return
    for line in found.shell():
        typer.echo(plain(line))


def _rank(found: Configurations, json: bool) -> None:
    if json:
        print_document(found.document())
        return
    for line in shell_lines(found):
        typer.echo(plain(line))
