"""How a trace is served: its requests through the simulated scheduler, under one setup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nsa_tune.autotune.workload.arrivals import Arrival
from nsa_tune.autotune.workload.simulation import (
    Latencies,
    Pass,
    SchedulerConfig,
    simulated,
    stated_s,
)
from nsa_tune.reports.traffic.attention import PLUGIN
from nsa_tune.reports.traffic.pass_prices import PriceList

_LATE, _LATE_S = 1.01, 30.0
"""An engine does not keep up that ends so many times, and seconds, after the last arrival."""


class Setups(NamedTuple):
    """Which setup prefills and which decodes run under."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Served:
    """A trace in one engine, under one setup."""

    span_s: float  # from the first arrival to the last
    wall_s: float  # from the first arrival to the last token
    ttft_s: dict[str, float]
    """Time to the first token: "mean", "p50" and "p90" over the requests."""
    tpot_s: dict[str, float]  # time of an output token after the first, likewise
    output_tokens_per_s: float

    @property
    def engines(self) -> float:
        """Engines that serve the trace as it comes: above 1 one engine's queue grows."""
        late = self.wall_s > max(_LATE * self.span_s, self.span_s + _LATE_S)
        return self.wall_s / self.span_s if late and self.span_s else 1.0


def served(
    requests: Sequence[Arrival], scheduler: SchedulerConfig, prices: PriceList, setups: Setups, *,
    factor: float = 1.0, count: bool = False, latencies: Latencies | None = None,
    sent: Iterable[Arrival | None] = (),
) -> Served:  # fmt: skip
    """Serve `requests`, which are in order of arrival, by the clock of `setups`.

    All passes take `factor` times their price. With `count` they are counted in the price list.
    `latencies` are filled; clients that wait give `sent`. Without a model rates are constant.
    """
    latencies, end_s = latencies or Latencies(), 0.0

    def seconds(forward: Pass) -> float:
        price = prices.of(forward)
        pass_us = price.us[setups.prefill if forward.is_extend else setups.decode]
        forward.launch_s = factor * price.launch_us[setups.prefill == PLUGIN] / 1e6
        forward.unqueued = prices.prices.unqueued * (forward.launch_s > 0)
        return factor * pass_us / 1e6 + prices.prices.between_s

    clock = stated_s if prices.prices.model is None else seconds
    for forward in simulated(sent or requests, scheduler, clock, latencies=latencies):
        end_s = forward.start_s + forward.steps * forward.seconds
        if count:
            prices.of(forward).count += forward.steps
    tokens = sum(request.output_tokens for request in requests)
    return Served(
        requests[-1].arrival_s if requests else 0.0, end_s,
        _quantiles(latencies.first_token_s), _quantiles(latencies.per_token_s),
        tokens / end_s if end_s else 0.0,
    )  # fmt: skip


def _quantiles(values: list[float]) -> dict[str, float]:
    values = sorted(values) or [0.0]
    p50, p90 = (values[round(share * (len(values) - 1))] for share in (0.5, 0.9))
    return {"mean": sum(values) / len(values), "p50": p50, "p90": p90}


def seconds_of(prices: PriceList, setup: str, *, extend: bool) -> float:
    """Seconds of all counted passes of a kind under one setup."""
    kind = (one for one in prices.shapes.values() if (one.batch.mode == "extend") == extend)
    return sum(one.count * one.us[setup] for one in kind if one.count) / 1e6
