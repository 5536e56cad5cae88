"""How a trace is served: its requests through the simulated scheduler, under one setup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_tune._errors import UsageError
from nsa_tune.autotune.workload.arrivals import Arrival
from nsa_tune.autotune.workload.simulation import (
    Latencies,
    Pass,
    SchedulerConfig,
    simulated,
    stated_s,
)
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.decision_log import read_decisions
from nsa_tune.reports.traffic.pass_prices import PriceList

_BETWEEN_PASSES_S = 0.003
"""From one pass to the next: 2.8 to 3.6 ms on the traces of docs/gains.md."""
_LATE, _LATE_S = 1.05, 30.0
"""An engine does not keep up that ends so many times, and seconds, after the last arrival."""


@dataclass(frozen=True, slots=True)
class Setups:
    """Which setup prefills and which decodes run under."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Served:
    """A trace in one engine, under one setup."""

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
        late = self.wall_s > max(_LATE * self.span_s, self.span_s + _LATE_S)
        return self.wall_s / self.span_s if late and self.span_s else 1.0


def served(
    requests: Sequence[Arrival],
    scheduler: SchedulerConfig,
    prices: PriceList,
    setups: Setups,
    *,
    factor: float = 1.0,
    count: bool = False,
    latencies: Latencies | None = None,
) -> Served:
    """Serve `requests`, which are in order of arrival, by the clock of `setups`.

    All passes take `factor` times their price. With `count` they are counted in the price list.
    `latencies` are filled. Without a model of whole passes the clock has constant rates.
    """
    latencies, end_s = latencies or Latencies(), 0.0

    def seconds(forward: Pass) -> float:
        us = prices.of(forward).price.us
        pass_us = us[setups.prefill if forward.is_extend else setups.decode]
        return factor * pass_us / 1e6 + _BETWEEN_PASSES_S

    clock = stated_s if prices.prices.model is None else seconds
    for forward in simulated(requests, scheduler, clock, latencies=latencies):
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


def logged(path: Path, dispatcher: Dispatcher) -> list[tuple[Batch, float]]:
    """(batch, count) of the decisions in a log under the GPU, model, heads and KV layout in use.

    Raises:
        UsageError: when it has none.
    """
    setting = dispatcher.setting
    wanted = (setting.device.name, setting.profile.name, setting.heads, str(setting.layout))
    by_key: dict[tuple[str, str, int, str], list[tuple[Batch, float]]] = {}
    for decision in read_decisions(path):
        key = (decision.gpu, decision.model, decision.heads, decision.kv_layout)
        by_key.setdefault(key, []).append((decision.batch, decision.count))
    if wanted not in by_key:
        words = "; ".join(", ".join(map(str, key)) for key in sorted(by_key)) or "no decisions"
        raise UsageError(
            f"{path} has no decisions for {', '.join(map(str, wanted))}; it has {words}"
        )
    return by_key[wanted]


def seconds_of(prices: PriceList, setup: str, *, extend: bool) -> float:
    """Seconds of all counted passes of a kind under one setup."""
    shapes = (shape for shape in prices.shapes.values() if shape.count)
    kind = (shape for shape in shapes if (shape.batch.mode == "extend") == extend)
    return sum(shape.count * shape.price.us[setup] for shape in kind) / 1e6
