"""Requests through the simulated scheduler, or a decision log, into a tally."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from math import exp, log
from pathlib import Path
from typing import NamedTuple

from nsa_tune._cli.traffic.options import TrafficOptions
from nsa_tune._errors import UsageError
from nsa_tune.autotune.workload.arrivals import KeptArrivals, arrivals
from nsa_tune.autotune.workload.requests import TraceRequest, stream_requests
from nsa_tune.autotune.workload.simulation import Pass, SchedulerConfig, simulated
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.engines.decision_log import read_decisions
from nsa_tune.reports.replay.prices import Way
from nsa_tune.reports.replay.rest import RestOfPass, kind_of
from nsa_tune.reports.replay.result import Served, percentile
from nsa_tune.reports.replay.tally import Tally
from nsa_tune.reports.replay.whole_prefills import Basis

_STEP = 0.01
"""Times to first token are counted in steps of this part of themselves."""
_LEAST_S = 1e-6


class Timed(NamedTuple):
    """A replay that is over."""

    served: Served
    most_pool_tokens: int
    """Of the requests that ran at once."""


def replay_requests(
    trace: KeptArrivals,
    options: TrafficOptions,
    tally: Tally,
    way: Way,
    rest: RestOfPass | None,
    setup: str | None = None,
    *,
    adds: bool = True,
) -> Timed:
    """Replay a trace, as `opened` with these options, into `tally`, with the clock of `way`; or of
    a `setup` of the tally's whole prefills, by which these then take their time.

    Without `adds` the tally is only asked for prices, and `most_pool_tokens` is 0. So several
    replays of a trace share the prices of passes that are alike.

    Raises:
        UsageError: as `stream_requests`.
        NsaTuneError: as `KeptArrivals`.
    """
    engine = options.scheduler
    clock = _clock(tally, engine, way, rest)
    if setup is not None:
        clock = _whole_clock(tally, setup, clock)
    waits: defaultdict[int, int] = defaultdict(int)
    end_s = busy_s = total_s = 0.0
    most = 0
    for one in simulated(trace, engine, clock):
        if adds:
            extend, sums = one.is_extend, one.sums
            tally.add(extend, sums, one.batch, one.steps)
            pool_tokens = one.pool_tokens if extend else sums[2]
            if pool_tokens > most:
                most = pool_tokens
        taken = one.steps * one.seconds
        end_s, busy_s = one.start_s + taken, busy_s + taken
        for wait in one.first_tokens_s:
            total_s += wait
            waits[round(log(max(wait, _LEAST_S)) / _STEP)] += 1
    counted = trace.counted
    by_wait = {exp(step * _STEP): count for step, count in waits.items()}
    served = Served(
        way=setup or str(way),
        wall_s=end_s,
        busy_s=busy_s,
        ttft_s={
            "mean": total_s / max(counted.requests, 1),
            **{f"p{p}": percentile(by_wait, p / 100) for p in (50, 90, 99)},
        },
        prompt_tokens_per_s=counted.prompt_tokens / end_s if end_s else 0.0,
        output_tokens_per_s=counted.output_tokens / end_s if end_s else 0.0,
    )
    return Timed(served, most)


def opened(trace: Path, options: TrafficOptions) -> KeptArrivals:
    """The requests of one rank, for `replay_requests` with the same `dp`. To be closed."""
    every: Iterable[TraceRequest] = islice(stream_requests(trace), 0, options.requests, options.dp)
    if options.speed != 1:
        every = map(partial(_sooner, options.speed), every)
    return KeptArrivals(arrivals(every, options.cache_tokens))


def _sooner(speed: float, one: TraceRequest) -> TraceRequest:
    return one._replace(arrival_s=one.arrival_s / speed)


def _clock(
    tally: Tally, engine: SchedulerConfig, way: Way, rest: RestOfPass | None
) -> Callable[[Pass], float]:
    """How long a pass takes: as priced and stated, or by the engine's constant rates."""

    def stated(one: Pass) -> float:
        if one.is_extend:
            return one.sums[1] / engine.prefill_rate
        return engine.decode_s

    if rest is None:
        return stated

    def priced(one: Pass) -> float:
        extend, sums = one.is_extend, one.sums
        attention = tally.price(extend, sums, one.batch).total_us(way)
        kind = kind_of(extend=extend, graph=tally.graph(extend, sums))
        padding = tally.padding(extend, sums)
        return rest.ms(kind, attention / 1e3, sums, padding=padding) / 1e3

    return priced


def _whole_clock(
    tally: Tally, setup: str, otherwise: Callable[[Pass], float]
) -> Callable[[Pass], float]:
    """As whole prefills take under a setup; `otherwise` for one without a price, and a decode."""

    took, none = tally.took, Basis.NONE

    def seconds(one: Pass) -> float:
        if one.is_extend:
            _, us, basis = took(one.sums, one.batch)[setup]
            if basis is not none:
                return us / 1e6
        return otherwise(one)

    return seconds


def replay_decisions(log: Path, tally: Tally) -> None:
    """Add the decisions of a log to `tally`, each as often as it came."""
    for batch, count in logged(log, tally.pricer.dispatcher):
        sums = (
            batch.batch_size, batch.q_tokens, batch.kv_tokens, batch.max_kv, batch.pairs,
        )  # fmt: skip
        tally.add(batch.mode is Mode.EXTEND, sums, partial(_itself, batch), round(count))


def _itself(batch: Batch) -> Batch:
    return batch


def logged(log: Path, dispatcher: Dispatcher) -> list[tuple[Batch, float]]:
    """(batch, count) of the decisions in `log` under the GPU, model, heads and KV layout in use.

    Raises:
        UsageError: when it has none.
    """
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
