"""The command `advise`: how to launch an engine for some traffic."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import print_document
from nsa_tune._cli.shared.option_groups import grouped
from nsa_tune._cli.shared.options import AsJson, Engine, duration
from nsa_tune._cli.traffic.options import EngineOptions, PricingOptions
from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.types.profiles import family_of
from nsa_tune.reports.analysis import dense_rules
from nsa_tune.reports.formats.plain import plain
from nsa_tune.reports.traffic.advice import WITH_DP, WITH_POOL, Advice
from nsa_tune.reports.traffic.advice import advise as advised
from nsa_tune.reports.traffic.answer import larger_tp, lines
from nsa_tune.reports.traffic.goals import Goal, GoalAnswer, cheapest, goal_lines
from nsa_tune.reports.traffic.launch import Launch


@grouped
def advise(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TRACE | -- COMMAND]", help="As --trace; or the launch command in use."
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option("--engine", help="Engine to advise.")] = Engine.SGLANG,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Requests to be served, or a decision log (NSA_TUNE_LOG)."),
    ] = None,
    ttft_p90: Annotated[
        str | None,
        typer.Option("--ttft-p90", help="Goal: time to first token of nine in ten requests: 2s."),
    ] = None,
    tpot: Annotated[str | None, typer.Option("--tpot", help="Goal: time per token: 30ms.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Available GPUs.")] = None,
    *,
    options: EngineOptions,
    table: PricingOptions,
    json: AsJson = False,
) -> None:
    """Say how to launch an engine for a trace, and what that gives.

    Prints the command, what changes against the flags in use, times to first token, tokens a
    second, memory, and what the plug-in adds. Of dense MLA, whose passes are not priced, only what
    the engines' thresholds lose in attention.
    """
    if words and len(words) == 1:  # a trace, as replay takes it
        trace, words = trace or Path(words[0]), None
    options = replace(options, flags=f"{options.flags} {shlex.join(words or ())}")
    launch = Launch.parse(str(engine), options.flags)
    if gpus is not None and launch.number("tp") is None and table.heads is None:
        tp = f"{launch.name('tp')} {2 ** min(gpus.bit_length() - 1, 3)}"
        options = replace(options, flags=f"{options.flags} {tp}")
        launch = Launch.parse(str(engine), options.flags)
    table = table.named(launch)
    answer: dense_rules.DenseAdvice | Advice | GoalAnswer
    if family_of(table.model) == "mla":
        answer = dense_rules.advised(table.dense(launch, ttft_p90, tpot), str(engine))
        unread = f" The trace is not read: passes of {table.model} are not priced."
        answer = replace(answer, note=answer.note + unread * (trace is not None))
        text = iter(answer.lines())
    else:
        goal = Goal(duration("--ttft-p90", ttft_p90), duration("--tpot", tpot))
        deployment = table.deployment(engine, options)
        if gpus is not None and gpus < deployment.tp:
            raise UsageError(f"--gpus {gpus} is too few: one engine takes {deployment.tp}")
        traffic = options.traffic(trace)
        other_kv = "fp8" if deployment.kv_dtype == "bf16" else "bf16"
        other = partial(table.deployment, engine, options, kv_dtype=other_kv)
        beside = {f"{WITH_POOL} {other_kv}": other} if traffic.trace is not None else {}
        if beside and gpus and engine is Engine.SGLANG and deployment.dp == 1:
            # Each rank has all heads then, whatever --heads says of a split by them.
            ranks = f"{launch.name('tp')} {deployment.tp} --dp {deployment.tp}"
            ranked = replace(options, flags=f"{options.flags} {ranks} --enable-dp-attention")
            beside[WITH_DP] = partial(replace(table, heads=None).deployment, engine, ranked)
        if goal != Goal(None, None):
            others = [] if deployment.kv_is_given else [other()]
            with suppress(NoTunedData, UsageError):
                others += [beside[WITH_DP]()] if WITH_DP in beside else []
            answer = cheapest([deployment, *others], traffic, goal, gpus or 0)
            text = goal_lines(answer)
        else:
            answer = advised(deployment, traffic, beside, gpus or 0)
            text = lines(answer)
            if deployment.memory and not deployment.fits and not json:  # what does, below
                tp = f"{launch.name('tp')} {larger_tp(deployment.memory, launch)}"
                more = replace(options, flags=f"{options.flags} {tp}")
                with suppress(NoTunedData, UsageError):
                    fitting = advised(replace(table, heads=None).deployment(engine, more), traffic)
                    text = chain(text, ("", "What fits:"), lines(fitting))
    if json:
        print_document({**answer.document(), "left_out": [*launch.misspelled.values()]})
    else:
        typer.echo("\n".join(map(plain, (next(text), *launch.misspelled.values(), *text))))
