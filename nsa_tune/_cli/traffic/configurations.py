"""Whole configurations compared on a trace, for `advise --trace`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.shared.option_groups import DispatcherOptions
from nsa_tune._cli.shared.options import KvDtype, heads_of, model_of
from nsa_tune._cli.traffic.options import TrafficOptions
from nsa_tune._cli.traffic.prices import pricer_for, whole_prefills
from nsa_tune._cli.traffic.replaying import opened, replay_requests
from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.autotune.workload.arrivals import KeptArrivals
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.engines.sglang.releases import Release
from nsa_tune.reports.replay.configurations import (
    Configuration,
    Configurations,
    Ranked,
    judged,
    parsed_flags,
    ranked,
)
from nsa_tune.reports.replay.prices import Pricer, Way
from nsa_tune.reports.replay.rest import RestOfPass
from nsa_tune.reports.replay.tally import Tally
from nsa_tune.reports.replay.whole_prefills import EAGER, ENGINE

_SHOWN = 12
_DEFAULT_KV = "bf16"
"""What SGLang's "auto" is below SM100."""


@dataclass(frozen=True, slots=True)
class ComparedOptions:
    """Options that say which configurations are compared."""

    chunks: Annotated[
        str,
        typer.Option("--chunks", help="With --trace: chunk sizes to compare, comma-separated."),
    ] = "2048,4096,8192,16384"
    next_ns: Annotated[
        str | None,
        typer.Option(
            "--next-ns", help="With --trace: values of next_n to compare. Default: --next-n alone."
        ),
    ] = None
    attention: Annotated[
        str,
        typer.Option(
            "--attention", help="With --trace: tp, dp (data-parallel attention) or tp,dp."
        ),
    ] = "tp"
    flags: Annotated[
        str,
        typer.Option(
            "--flags", help="With --trace: the flags in use, to print what to change in them."
        ),
    ] = ""


def compared(
    trace: Path,
    table: DispatcherOptions,
    traffic: TrafficOptions,
    options: ComparedOptions,
    release: Release,
) -> Configurations:
    """Every configuration on the trace.

    Raises:
        NoTunedData: when there is no table for any of them.
        UsageError: for an option that means nothing.
    """
    if traffic.pass_times and not traffic.rest:
        raise UsageError(
            "give --rest besides --pass-times: not every pass of a trace was measured, and without "
            "it configurations cannot be compared"
        )
    # What cannot be read is told now, and not after minutes.
    given = parsed_flags(options.flags)
    for path in traffic.rest or ():
        RestOfPass.read(path)
    skipped: list[str] = []
    found: list[Ranked] = []
    with ExitStack() as stack:
        by_dp: dict[int, KeptArrivals] = {}
        for base, pricer in _priced(table, traffic, options, skipped, release):
            if base.dp not in by_dp:
                requests = opened(trace, replace(traffic, dp=base.dp))
                by_dp[base.dp] = stack.enter_context(requests)
            found += _replayed(by_dp[base.dp], base, pricer, traffic, release)
    if not found:
        raise NoTunedData(f"there are no times to compare with: {'; '.join(skipped)}")
    if traffic.pass_times and not any(one.pass_times for one in found):
        raise UsageError("none of the files of --pass-times is of an engine that is compared here")
    default = min(found, key=_distance)
    return Configurations(
        trace.name, default, tuple(judged(found, default)), given,
        tuple(skipped),
    )  # fmt: skip


def _distance(one: Ranked) -> tuple[bool, ...]:
    """How far a configuration is from the engine's defaults."""
    own = one.configuration
    plain = not own.plugin and own.prefill.kernel is None and own.decode.kernel is None
    return (
        not plain or own.prefill.threshold is not None,
        own.kv_dtype != _DEFAULT_KV,
        own.dp != 1,
        own.chunk != 8192,
        not own.graphs,
        own.next_n != 1,
    )


def _priced(
    table: DispatcherOptions,
    traffic: TrafficOptions,
    options: ComparedOptions,
    skipped: list[str],
    release: Release,
) -> Iterator[tuple[Configuration, Pricer]]:
    chunks = _numbers("--chunks", options.chunks)
    next_ns = _numbers("--next-ns", options.next_ns or str(traffic.next_n))
    gpu = table.gpu or detect.local_device_name()
    model = model_of(table.model, gpu)
    local, every = heads_of(table.heads, model), profile_of(model).heads
    ways = [word.strip() for word in options.attention.split(",")]
    if not ways or set(ways) - {"tp", "dp"}:
        raise UsageError(f"--attention {options.attention!r} is not tp, dp or tp,dp")
    for way, kv_dtype in product(ways, KvDtype):
        heads, dp = (local, 1) if way == "tp" else (every, every // local)
        try:
            own = replace(table, gpu=gpu, model=model, heads=heads, kv_dtype=kv_dtype)
            pricer, _ = pricer_for(own.open(), release, table.database)
            traffic.model(str(kv_dtype))
        except (NoTunedData, UsageError) as error:
            skipped.append(f"{way}, {kv_dtype}: {error}")
            continue
        for chunk, graphs, next_n in product(chunks, (True, False), next_ns):
            base = Configuration(
                str(kv_dtype), every // local, dp, chunk, graphs, next_n, plugin=False
            )
            yield base, pricer


def _replayed(
    trace: KeptArrivals,
    base: Configuration,
    pricer: Pricer,
    traffic: TrafficOptions,
    release: Release,
) -> list[Ranked]:
    options = replace(traffic, chunk=base.chunk, dp=base.dp, next_n=base.next_n)
    rest = options.model(base.kv_dtype)
    whole = None
    # Without the rest, passes that were measured cannot be added to those that were not; with
    # data-parallel attention ranks wait for each other.
    if rest is not None and base.dp == 1:
        whole = whole_prefills(options.pass_times or (), pricer, rest, next_n=base.next_n)
    tally = Tally(pricer, options.graphs(release) if base.graphs else 0, rest, whole=whole)
    setup = None if whole is None else (ENGINE if base.graphs else EAGER)
    timed = replay_requests(trace, options, tally, Way.ENGINE, rest, setup)
    tally.done()
    pool_tokens = timed.most_pool_tokens + options.cache_tokens // base.dp
    return list(ranked(tally, base, pool_tokens))


def _numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a list of whole numbers like 1,2") from None
    if min(found) < 1:
        raise UsageError(f"{option} {text!r} has a number below 1")
    return list(dict.fromkeys(found))


def shell_lines(found: Configurations) -> Iterator[str]:
    """Comments that rank the configurations, and the best one's flags for a shell."""
    best, default = found.best, found.default
    what = "attention" if best.passes_s is None else "passes"
    yield f"# {found.trace}: seconds of {what} in one rank, GiB of its KV pool"
    front = [one for one in found.ranked if one.pareto]
    others = [one for one in found.ranked if not one.pareto and one is not default]
    yield "# no other takes less of one and no more of the other:"
    yield from (f"#   {_line(one, default)}" for one in front[:_SHOWN])
    yield "# the default:"
    yield f"#   {_line(default, default)}"
    if others:
        yield f"# and {len(others)} more, of which the fastest:"
        yield from (f"#   {_line(one, default)}" for one in others[: max(_SHOWN - len(front), 3)])
    for text in found.skipped:
        yield f"# not compared: {' '.join(text.split())}"
    steps = ", ".join(best.unpriced)
    if steps:
        yield f"# not measured, and so not counted in some passes: {steps}"
    yield "# the fastest that is surely faster than the default, else the default:"
    for word in best.configuration.environment():
        yield f"export {word}"
    yield f'NSA_TUNE_SGLANG_ARGS="{best.configuration.arguments()}"'
    if found.given:
        lines = found.document()["differences"]
        yield "# what differs from the flags that were given:" if lines else "# nothing differs"
        yield from (f"#   {line}" for line in lines)


def _line(one: Ranked, default: Ranked) -> str:
    own = one.configuration
    words = [own.arguments(), *own.environment()]
    if own.plugin:
        words.append("with the plug-in")
    doubts = f"  (unsure: {'; '.join(one.unsure)})" if one.unsure and one is not default else ""
    return (
        f"{one.seconds:9.1f} s  {one.seconds / default.seconds:6.1%}  {one.memory_gib:6.1f} GiB  "
        f"{' '.join(words)}{doubts}"
    )
