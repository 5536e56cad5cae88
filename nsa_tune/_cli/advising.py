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
from nsa_tune._errors import UsageError
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.engines.decision_log import read_decisions
from nsa_tune.backend.types.batch import Batch
from nsa_tune.reports.advice.advise import advise as advised
from nsa_tune.reports.output.plain import plain

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
    eager_prefill: Annotated[
        bool,
        typer.Option("--eager-prefill", help="The engine runs prefills without CUDA graphs."),
    ] = False,
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
    dispatcher = dispatcher_for(gpu, model, heads, kv_dtype, database, strict)
    batches = None if log is None else _logged(log, dispatcher)
    found = advised(dispatcher, version, batches, eager_prefill=eager_prefill)
    if json:
        typer.echo(answers.as_text({"schema": "nsa-tune/advise/2", **asdict(found)}))
        return
    for line in found.shell():
        typer.echo(plain(line))


def _logged(log: Path, dispatcher: Dispatcher) -> list[tuple[Batch, float]]:
    """The decisions in `log` by this table's GPU, model, heads and KV layout."""
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
