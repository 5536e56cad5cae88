"""How a trace is served: its requests through the simulated scheduler, under one setup."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from nsa_tune._errors import UsageError
from nsa_tune.autotune.workload.arrivals import Arrival, arrivals
from nsa_tune.autotune.workload.requests import TraceRequest, read_requests
from nsa_tune.autotune.workload.simulation import Latencies, Pass, SchedulerConfig, simulated
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.decision_log import read_decisions
from nsa_tune.reports.traffic.pass_prices import PriceList

_LATE = 1.05
"""An engine that ends so much later than the last request arrives does not keep up."""


@dataclass(frozen=True, slots=True)
class Setups:
    """Which setup prefills and which decodes run under."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Served:
    """A trace in one engine, under one setup."""

    requests: int
    span_s: float
    """From the first arrival to the last."""
    wall_s: float
    """From the first arrival to the last token."""
    ttft_s: dict[str, float]
    """Time to the first token: "mean", "p50" and "p90" over the requests."""
    tpot_s: dict[str, float]
    """Time of an output token after the first, likewise."""
    output_tokens_per_s: float

    @property
    def engines(self) -> float:
        """Engines that serve the trace as it comes: above 1 one engine's queue grows."""
        return self.wall_s / self.span_s if self.wall_s > _LATE * self.span_s > 0 else 1.0


def served(
    requests: Sequence[Arrival],
    scheduler: SchedulerConfig,
    prices: PriceList,
    setups: Setups,
    *,
    factor: float = 1.0,
    count: bool = False,
) -> Served:
    """Serve `requests`.

    Args:
        requests: in order of arrival.
        scheduler: the engine's settings.
        prices: of its passes. Without a model of whole passes the clock has constant rates.
        setups: whose times the clock runs by.
        factor: all passes take so many times their price.
        count: whether the passes are counted in the price list.
    """
    latencies = Latencies()
    by_setup = _clock(prices, scheduler, setups, factor)
    end_s = 0.0
    for one in simulated(requests, scheduler, by_setup, latencies=latencies):
        end_s = one.start_s + one.steps * one.seconds
        if count:
            prices.of(one).count += one.steps
    tokens = sum(one.output_tokens for one in requests)
    return Served(
        len(requests), requests[-1].arrival_s if requests else 0.0, end_s,
        _quantiles(latencies.first_token_s), _quantiles(latencies.per_token_s),
        tokens / end_s if end_s else 0.0,
    )  # fmt: skip


def _clock(
    prices: PriceList, scheduler: SchedulerConfig, setups: Setups, factor: float
) -> Callable[[Pass], float]:
    if prices.prices.model is None:
        return scheduler.stated_s
    scale = factor / 1e6

    def seconds(one: Pass) -> float:
        us = prices.of(one).price.us
        return scale * us[setups.prefill if one.is_extend else setups.decode]

    return seconds


def _quantiles(values: list[float]) -> dict[str, float]:
    values.sort()
    last = len(values) - 1
    if last < 0:
        return dict.fromkeys(("mean", "p50", "p90"), 0.0)
    return {
        "mean": sum(values) / len(values), "p50": values[round(0.5 * last)],
        "p90": values[round(0.9 * last)],
    }  # fmt: skip


def requests_of(
    path: Path, pool_tokens: int, *, requests: int | None = None, speed: float = 1.0, share: int = 1
) -> list[Arrival]:
    """The requests of a trace as one engine meets them.

    Args:
        path: of the trace.
        pool_tokens: tokens that the prefix cache holds.
        requests: how many of the trace; None: all.
        speed: how much faster than in the trace they come.
        share: only every so manyth of them, as one of `share` engines or ranks gets.

    Raises:
        UsageError: when it cannot be read.
    """
    own: Iterable[TraceRequest] = read_requests(path)[:requests:share]
    if speed != 1:
        own = (one._replace(arrival_s=one.arrival_s / speed) for one in own)
    return list(arrivals(own, pool_tokens))


def logged(path: Path, dispatcher: Dispatcher) -> list[tuple[Batch, float]]:
    """(batch, count) of the decisions in a log under the GPU, model, heads and KV layout in use.

    Raises:
        UsageError: when it has none.
    """
    setting = dispatcher.setting
    wanted = (setting.device.name, setting.profile.name, setting.heads, str(setting.layout))
    found: list[tuple[Batch, float]] = []
    others: set[tuple[str, str, int, str]] = set()
    for one in read_decisions(path):
        key = (one.gpu, one.model, one.heads, one.kv_layout)
        if key == wanted:
            found.append((one.batch, one.count))
        else:
            others.add(key)
    if not found:
        words = "; ".join(", ".join(map(str, key)) for key in sorted(others)) or "no decisions"
        raise UsageError(
            f"{path} has no decisions for {', '.join(map(str, wanted))}; it has {words}"
        )
    return found


def best_flag(prices: PriceList, flags: Iterable[str], default: str, *, extend: bool) -> str:
    """The setup with the least time over all counted passes of a kind: a flag, or `default`."""
    return min((default, *flags), key=lambda setup: seconds_of(prices, setup, extend=extend))


def seconds_of(prices: PriceList, setup: str, *, extend: bool) -> float:
    """Seconds of all counted passes of a kind under one setup."""
    total = 0.0
    for shape in prices.shapes.values():
        if shape.count and (shape.batch.mode == "extend") == extend:
            us = shape.price.us[setup]
            if us == inf:
                return inf
            total += shape.count * us
    return total / 1e6
