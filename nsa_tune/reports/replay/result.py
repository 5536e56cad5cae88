"""What a replay found, as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.reports.replay.chunks import ChunkTime
from nsa_tune.reports.replay.flags import Flags
from nsa_tune.reports.replay.prices import Way
from nsa_tune.reports.replay.rest import RestOfPass
from nsa_tune.reports.replay.tally import Lost, SharedPrices, Tally
from nsa_tune.reports.replay.whole_result import WholePasses

SCHEMA = "nsa-tune/replay/1"
NAMES = {True: "prefill", False: "decode"}
"""What extends, and other passes, are called."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A time in seconds, with its ends if every estimate erred to the same side."""

    seconds: float
    low: float
    high: float

    @classmethod
    def of(cls, one: Estimate) -> Interval:
        """An estimate in microseconds as seconds."""
        return cls(one.latency_us / 1e6, one.low_us / 1e6, one.high_us / 1e6)


@dataclass(frozen=True, slots=True)
class StaticFlags:
    """The flags with the least time on the whole trace."""

    flags: tuple[str, ...]
    """Empty where the defaults are the best."""
    seconds: float


@dataclass(frozen=True, slots=True)
class KindOfPass:
    """All prefill passes, or all decode passes. Times are of attention, in all layers."""

    passes: int
    new_tokens: int
    ways: Mapping[str, Interval]
    """By `Way`."""
    static: StaticFlags | None
    """None where no flags can run everywhere."""
    steps: Mapping[str, Mapping[str, float]]
    """Seconds by decision point and way."""
    questions: Mapping[str, float]
    """Seconds that the engine would save if only this answer were the table's."""
    unpriced: Mapping[str, int]
    """Passes by the step that has no price in them."""
    extrapolated: float
    """Part of the engine's time that lies outside of the measured batches."""
    shared_prices: SharedPrices | None
    """How far it is off that passes which are alike share a price."""


@dataclass(frozen=True, slots=True)
class Served:
    """How the traffic was served, if passes took their price and the stated rest, or the measured
    times of whole passes."""

    way: str
    """Who chooses, or a setup of the engine."""
    wall_s: float
    """From the first request to the end of the last pass."""
    busy_s: float
    """Of it, the time in passes."""
    ttft_s: Mapping[str, float]
    """Time to first token: mean, p50, p90, p99."""
    prompt_tokens_per_s: float
    """Over `wall_s`, cached tokens included."""
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was replayed."""

    trace: str
    form: str
    """"requests" or "decisions"."""
    requests: int
    prompt_tokens: int
    output_tokens: int
    scheduler: Mapping[str, float]
    """The settings of the simulated scheduler; empty for a decision log."""


@dataclass(frozen=True, slots=True)
class Table:
    """What the prices come from."""

    gpu: str
    model: str
    heads: int
    kv_layout: str
    layers: int
    source: str
    borrowed: Mapping[str, str]
    """By point: the table that its times come from, where the own one has none."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A whole replay."""

    traffic: Traffic
    table: Table
    baseline: str
    """The engine."""
    graph_tokens: int
    """Prefills up to so many new tokens run as CUDA graphs."""
    kinds: Mapping[str, KindOfPass]
    """By "prefill" and "decode"; only those that there are."""
    lost: tuple[Lost, ...]
    """Shapes of passes on which the engine loses most time, the worst first."""
    served: tuple[Served, ...]
    """By way; empty without a model of the rest of a pass, and without pass times."""
    rest: RestOfPass | None
    chunks: tuple[ChunkTime, ...] = ()
    """Single prompts in chunks of each size."""
    whole: WholePasses | None = None
    """Whole prefills; None without pass times."""

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        found = asdict(self)
        for shown, one in zip(found["lost"], self.lost, strict=True):
            shown["lost_us"] = one.lost_us
        return {"schema": SCHEMA, **found}

    def total(self, way: Way) -> float:
        """Seconds of attention in all passes."""
        return sum(one.ways[way].seconds for one in self.kinds.values())

    @property
    def static_total(self) -> float | None:
        """The same under the best flags for each kind of pass; None where there are none."""
        found = [one.static for one in self.kinds.values()]
        known = [one.seconds for one in found if one is not None]
        return sum(known) if len(known) == len(found) else None


def kinds_of(tally: Tally) -> dict[str, KindOfPass]:
    """What `tally` has added up."""
    shared = tally.shared_prices()
    return {
        name: _kind(tally, extend, shared.get(extend))
        for extend, name in NAMES.items()
        if tally.kinds[extend].passes
    }


def _kind(tally: Tally, extend: bool, shared: SharedPrices | None) -> KindOfPass:
    kind = tally.kinds[extend]
    engine = tally.total(extend, Way.ENGINE).latency_us
    outside = sum(ways[0][3] for ways in kind.steps.values())
    return KindOfPass(
        passes=kind.passes,
        new_tokens=kind.new_tokens,
        ways={str(way): Interval.of(tally.total(extend, way)) for way in Way},
        static=_static(tally.static(extend), extend),
        steps={
            point: {str(way): rows[i][0] / 1e6 for i, way in enumerate(Way)}
            for point, rows in kind.steps.items()
        },
        questions={name: gain / 1e6 for name, gain in sorted(kind.gains_us.items())},
        unpriced=dict(kind.unpriced),
        extrapolated=outside / engine if engine else 0.0,
        shared_prices=shared,
    )


def _static(found: tuple[Flags, float] | None, extend: bool) -> StaticFlags | None:
    if found is None:
        return None
    flags, time_us = found
    return StaticFlags(tuple(flags.words(extend=extend)), time_us / 1e6)


def percentile(counts: Mapping[float, int], share: float) -> float:
    """The value below which `share` of the counted ones lie."""
    wanted, seen = share * sum(counts.values()), 0
    values: Sequence[float] = sorted(counts)
    for value in values:
        seen += counts[value]
        if seen >= wanted:
            return value
    return values[-1] if values else 0.0
