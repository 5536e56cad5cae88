"""A replay: what one trace takes under each setup of an engine, and where its own choices lose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.traffic.advice import Deployment, Traffic, notes_on
from nsa_tune.reports.traffic.attention import DEFAULT, PLUGIN
from nsa_tune.reports.traffic.pass_prices import PricedShape
from nsa_tune.reports.traffic.served import Served, Setups, best_flag, seconds_of, served

_MOST_SHAPES = 10


@dataclass(frozen=True, slots=True)
class SetupTotal:
    """All passes under one setup."""

    name: str
    prefill_s: float | None
    """None where it says nothing about prefills, or cannot run them."""
    decode_s: float | None
    served: Served | None
    """How the trace is served with it; None where that was not simulated."""


@dataclass(frozen=True, slots=True)
class WayTotal:
    """Prefills that the plug-in runs in one way."""

    way: str
    passes: int
    seconds: float
    default_s: float
    """The same passes in the engine by itself."""


@dataclass(frozen=True, slots=True)
class RegretByShape:
    """Passes of one shape, by what the engine by itself loses on them."""

    example: str
    passes: int
    default_s: float
    plugin_s: float
    default_kernel: str
    instead: str
    """The plug-in's way, or its kernel in the engine's own way."""

    @property
    def lost_s(self) -> float:
        """What the plug-in saves."""
        return self.default_s - self.plugin_s


@dataclass(frozen=True, slots=True)
class Replay:
    """Everything that a replay found."""

    trace: str
    requests: int
    passes: Mapping[str, int]
    """"prefill" and "decode"."""
    whole: bool
    """Whether whole passes are priced, and not attention alone."""
    setups: tuple[SetupTotal, ...]
    """The default, each flag, the plug-in."""
    ways: tuple[WayTotal, ...]
    shapes: tuple[RegretByShape, ...]
    """The worst first."""
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def total(self, name: str) -> SetupTotal:
        """The setup of that name."""
        return next(one for one in self.setups if one.name == name)

    @property
    def headline(self) -> str:
        """What the plug-in and the best flag are worth, in a sentence."""
        default = self.total(DEFAULT).prefill_s or 0.0
        if not default:
            return "The trace has no prefills that are priced."
        parts = "prefills" if self.whole else "the attention of prefills"
        plugin = _saved(default, self.total(PLUGIN).prefill_s)
        flags = [one for one in self.setups if one.name not in (DEFAULT, PLUGIN) and one.prefill_s]
        best = min(flags, key=lambda one: one.prefill_s or 0.0, default=None)
        text = f"With the plug-in {parts} take {plugin} less time than by the engine's own choices"
        if best is None or (best.prefill_s or 0.0) >= default:
            return f"{text}; no flag saves any."
        return f"{text}; with the best flag, {best.name}, {_saved(default, best.prefill_s)}."

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "schema": "nsa-tune/replay/2",
            "headline": self.headline,
            "trace": self.trace,
            "requests": self.requests,
            "passes": dict(self.passes),
            "whole_passes": self.whole,
            "setups": [asdict(one) for one in self.setups],
            "ways": [asdict(one) for one in self.ways],
            "shapes": [{**asdict(one), "lost_s": one.lost_s} for one in self.shapes],
            "facts": dict(self.facts),
            "notes": list(self.notes),
        }


def _saved(before: float, after: float | None) -> str:
    return f"{1 - after / before:.1%}" if after is not None and before else "-"


def replay(deployment: Deployment, traffic: Traffic) -> Replay:
    """Replay `traffic`.

    Raises:
        UsageError: when the traffic cannot be read.
    """
    requests = deployment.count(traffic)
    prices = deployment.prices
    setups = deployment.opened.prices.setups
    prefill, decode = (set(deployment.flags(extend=extend)) for extend in (True, False))
    best = best_flag(prices, deployment.flags(extend=True), DEFAULT, extend=True)
    totals = []
    for name in setups:
        told = None
        if requests and deployment.whole and name in (DEFAULT, PLUGIN, best):
            other = name if name not in prefill else DEFAULT
            told = served(requests, deployment.scheduler, prices, Setups(name, other))
        totals.append(
            SetupTotal(
                name,
                None if name in decode else _finite(seconds_of(prices, name, extend=True)),
                None if name in prefill else _finite(seconds_of(prices, name, extend=False)),
                told,
            )
        )
    counted = [one for one in prices.shapes.values() if one.count]
    kinds = {
        kind: sum(one.count for one in counted if (one.batch.mode == "extend") == extend)
        for kind, extend in (("prefill", True), ("decode", False))
    }
    return Replay(
        traffic.name, len(requests), kinds, deployment.whole, tuple(totals),
        tuple(_ways(counted)), tuple(_regrets(counted)), tuple(_facts(deployment)),
        tuple(notes_on(deployment, traffic)),
    )  # fmt: skip


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None


def _ways(counted: list[PricedShape]) -> Iterator[WayTotal]:
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for one in counted:
        if one.batch.mode == "extend":
            total = totals[str(one.price.way)]
            total[0] += one.count
            total[1] += one.count * one.price.us[PLUGIN] / 1e6
            total[2] += one.count * one.price.us[DEFAULT] / 1e6
    for way, (passes, seconds, default_s) in sorted(totals.items(), key=lambda item: -item[1][1]):
        yield WayTotal(way, round(passes), seconds, default_s)


def _regrets(counted: list[PricedShape]) -> list[RegretByShape]:
    """Passes whose sizes agree to a power of two, as one."""
    groups: defaultdict[tuple[object, ...], list[PricedShape]] = defaultdict(list)
    for one in counted:
        size, new, kv, *_ = one.sums
        kernels = _kernel(one, DEFAULT), _instead(one)
        groups[(size.bit_length(), new.bit_length(), kv.bit_length(), kernels)].append(one)
    found = [_regret(group) for group in groups.values()]
    found = [one for one in found if one.lost_s > 0]
    return sorted(found, key=lambda one: (-one.lost_s, one.example))[:_MOST_SHAPES]


def _regret(group: list[PricedShape]) -> RegretByShape:
    most = max(group, key=lambda one: one.count)
    return RegretByShape(
        str(most.batch),
        sum(one.count for one in group),
        sum(one.count * one.price.us[DEFAULT] for one in group) / 1e6,
        sum(one.count * one.price.us[PLUGIN] for one in group) / 1e6,
        _kernel(most, DEFAULT),
        _instead(most),
    )


def _kernel(one: PricedShape, setup: str) -> str:
    return one.price.attention.kernels.get(setup, "as the engine")


def _instead(one: PricedShape) -> str:
    """What the plug-in does otherwise; never empty."""
    way = str(one.price.way)
    if way not in ("engine", "table_kernel"):
        return way
    kernel = _kernel(one, PLUGIN)
    return kernel if kernel != _kernel(one, DEFAULT) else f"{kernel}, its copies by the plug-in"


def _facts(deployment: Deployment) -> Iterator[tuple[str, str]]:
    setting, scheduler = deployment.setting, deployment.scheduler
    yield "GPU", setting.device.name
    yield "model", f"{setting.profile.name}, {setting.heads} local heads, {deployment.kv_dtype} KV"
    yield "table", deployment.opened.prices.attention.dispatcher.source
    if deployment.opened.measured is not None:
        yield "whole passes", deployment.opened.measured.source
    for point, source in deployment.opened.lent.items():
        yield f"times of {point}", source
    yield "chunk", f"{scheduler.chunk_tokens} tokens"
    yield "requests at once", f"up to {scheduler.max_running}"
    yield "KV pool", f"{scheduler.pool_tokens} tokens"


def tables(found: Replay) -> list[DisplayTable]:
    """The tables of a replay."""
    return [_setups_table(found), _ways_table(found), _shapes_table(found)]


def _setups_table(found: Replay) -> DisplayTable:
    default = found.total(DEFAULT)
    rows = tuple(
        (
            one.name,
            _s(one.prefill_s), _saved(default.prefill_s or 0.0, one.prefill_s),
            _s(one.decode_s), _saved(default.decode_s or 0.0, one.decode_s),
            *(f"{one.served.ttft_s[q]:.3f}" if one.served else "" for q in ("mean", "p50", "p90")),
            f"{one.served.tpot_s['p90'] * 1e3:.0f}" if one.served else "",
        )
        for one in found.setups
    )  # fmt: skip
    return DisplayTable(
        "Passes by setup" if found.whole else "Attention of passes by setup",
        ("setup", "prefill s", "saved", "decode s", "saved", "TTFT mean s", "p50", "p90",
         "TPOT p90 ms"),
        rows, frozenset(range(1, 9)),
        "The same passes under every setup; times to first token by a simulation of each."
        if found.whole else "",
    )  # fmt: skip


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _ways_table(found: Replay) -> DisplayTable:
    whole = sum(one.seconds for one in found.ways) or 1.0
    rows = tuple(
        (one.way, str(one.passes), _s(one.seconds), f"{one.seconds / whole:.1%}",
         _s(one.default_s), _saved(one.default_s, one.seconds))
        for one in found.ways
    )  # fmt: skip
    return DisplayTable(
        "Prefills with the plug-in, by the way that they run",
        ("way", "passes", "seconds", "of them", "by the engine itself s", "saved"),
        rows,
        frozenset(range(1, 6)),
    )


def _shapes_table(found: Replay) -> DisplayTable:
    rows = tuple(
        (one.example if len(one.example) < 48 else f"{one.example[:45]}...", str(one.passes),
         _s(one.default_s), _s(one.lost_s), one.default_kernel, one.instead)
        for one in found.shapes
    )  # fmt: skip
    return DisplayTable(
        "Where the engine's own choices lose most",
        ("passes like", "passes", "seconds", "lost s", "the engine takes", "the plug-in takes"),
        rows,
        frozenset({1, 2, 3}),
    )
