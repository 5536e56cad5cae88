"""The command `advise`: how to launch an engine for some traffic."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
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
from nsa_tune.reports.traffic.deployment import Deployment
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
    options = options.with_flags(shlex.join(words or ()))
    launch = Launch.parse(str(engine), options.flags)
    if gpus is not None and launch.number("tp") is None and table.heads is None:
        options = options.with_flags(f"{launch.name('tp')} {2 ** min(gpus.bit_length() - 1, 3)}")
        launch = Launch.parse(str(engine), options.flags)
    table = table.named(launch)
    answer: dense_rules.DenseAdvice | Advice | GoalAnswer
    if family_of(table.model) == "mla":
        answer = dense_rules.advised(table.dense(launch, ttft_p90, tpot), str(engine))
        if trace is not None:
            unread = f"The trace is not read: passes of {table.model} are not priced."
            answer = replace(answer, note=f"{answer.note} {unread}")
        text = iter(answer.lines())
    else:
        goal = Goal(duration("--ttft-p90", ttft_p90), duration("--tpot", tpot))
        answer, text = _priced(engine, options, table, trace, goal, gpus or 0)
    if json:
        print_document({**answer.document(), "left_out": [*launch.misspelled.values()]})
    else:
        typer.echo("\n".join(map(plain, (next(text), *launch.misspelled.values(), *text))))


def _priced(
    engine: Engine, options: EngineOptions, table: PricingOptions, trace: Path | None, goal: Goal,
    gpus: int,
) -> tuple[Advice | GoalAnswer, Iterator[str]]:  # fmt: skip
    """The answer about a model whose passes are priced, and its lines."""
    given, traffic = table.deployment(engine, options), options.traffic(trace)
    if 0 < gpus < given.tp:
        raise UsageError(f"--gpus {gpus} is too few: one engine takes {given.tp}")

    def with_flags(more: str) -> Deployment:
        # They say the heads of a rank, whatever --heads says.
        return replace(table, heads=None).deployment(engine, options.with_flags(more))

    other_kv = "fp8" if given.kv_dtype == "bf16" else "bf16"
    with_pool = partial(table.deployment, engine, options, kv_dtype=other_kv)
    beside: dict[str, Callable[[], Deployment]] = {f"{WITH_POOL} {other_kv}": with_pool}
    tp = given.launch.name("tp")
    if gpus and engine is Engine.SGLANG and given.dp == 1:
        ranks = f"{tp} {given.tp} --dp {given.tp} --enable-dp-attention"
        beside[WITH_DP] = partial(with_flags, ranks)
    if traffic.trace is None:
        beside = {}
    if goal != Goal(None, None):
        deployments = [given] if given.kv_is_given else [given, with_pool()]
        with suppress(NoTunedData, UsageError):
            deployments += [beside[WITH_DP]()] if WITH_DP in beside else []
        found = cheapest(deployments, traffic, goal, gpus)
        return found, goal_lines(found)
    answer = advised(given, traffic, beside, gpus)

    def text() -> Iterator[str]:
        yield from lines(answer)
        if given.memory is not None and not given.fits:
            with suppress(NoTunedData, UsageError):
                more = with_flags(f"{tp} {larger_tp(given.memory, given.launch)}")
                yield from ("", "What fits:", *lines(advised(more, traffic)))

    return answer, text()
