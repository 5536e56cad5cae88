"""The command `advise`: values for the options that an engine already has."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli import json_documents
from nsa_tune._cli.options import AsJson, DispatcherOptions, Engine, grouped
from nsa_tune._errors import UsageError
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.engines.decision_log import read_decisions
from nsa_tune.backend.types.batch import Batch
from nsa_tune.reports.advice.sglang import advise as advise_sglang
from nsa_tune.reports.formats.plain import plain

__all__ = ["advise"]


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
        typer.Option("--eager-prefill", help="The engine runs prefills without CUDA graphs."),
    ] = False,
    *,
    table: DispatcherOptions,
    json: AsJson = False,
) -> None:
    """Print values for the engine's own flags and environment variables, as shell lines.

    Each comes with its gain over the default, how sure that is, and what deciding for each batch
    would gain on top.
    """
    del engine  # there is only one
    dispatcher = table.open()
    batches = None if log is None else _logged(log, dispatcher)
    found = advise_sglang(dispatcher, version, batches, eager_prefill=eager_prefill)
    if json:
        typer.echo(json_documents.as_text({"schema": "nsa-tune/advise/2", **asdict(found)}))
        return
    for line in found.shell():
        typer.echo(plain(line))


def _logged(log: Path, dispatcher: Dispatcher) -> list[tuple[Batch, float]]:
    """(batch, count) of the decisions in `log` under the GPU, model, heads and KV layout in use."""
    setting = dispatcher.setting
    wanted = (setting.device.name, setting.profile.name, setting.heads, str(setting.layout))
    found: list[tuple[Batch, float]] = []
    others: set[tuple[str, str, int, str]] = set()
    for one in read_decisions(log):
        key = (one.gpu, one.model, one.heads, one.kv_layout)
        if key == wanted:
            found.append((one.batch, one.count))
        else:
            others.add(key)
    if not found:
        words = "; ".join(", ".join(map(str, key)) for key in sorted(others)) or "no decisions"
        raise UsageError(
            f"{log} has no decisions for {', '.join(map(str, wanted))}; it has {words}"
        )
    return found
