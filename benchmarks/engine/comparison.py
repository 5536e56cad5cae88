"""What an engine's result says: the plug-in beside the default and the best static flags.

Samples are paired by sweep.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.engine.configurations import DEFAULT
from benchmarks.engine.paired import ratio_of, verdict_of
from benchmarks.engine.run import SCHEMA

__all__ = ["KINDS", "Contest", "Engine", "Line", "Option", "batch_name", "contest_of", "read"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of test: where its rows and times are."""

    test: str
    title: str
    metric: str
    """The time that decides, of `sweeps`."""
    unit: str
    name: Callable[[Mapping[str, Any]], str]


def batch_name(row: Mapping[str, Any]) -> str:
    """A batch as pages have it; two ragged ones have different names."""
    prefix, new = row.get("prefix", ()), row.get("new", ())
    if len(set(zip(prefix, new, strict=True))) < 2:
        return str(row["case"]).removesuffix(" x1")
    if not any(prefix[:-1]) and len(new) > 2:
        prefix = [f"0 x{len(new) - 1}", prefix[-1]] if prefix[-1] else ["0"]
    return f"{', '.join(map(str, prefix))} + {', '.join(map(str, new))}"


KINDS = (
    Kind("prefill", "Prefill: GPU time of a pass", "gpu_ms", "ms", batch_name),
    Kind("prefill", "Prefill: wall time of the request", "wall_ms", "ms", batch_name),
    Kind("loaded", "Prefill on a busy host: GPU time of a pass", "gpu_ms", "ms", batch_name),
    Kind("decode", "Decode: GPU time of a step", "gpu_ms", "ms",
         lambda row: f"{row['sequences']} sequences of {row['context']}"),
    Kind("decode", "Decode: time from step to step", "step_ms", "ms",
         lambda row: f"{row['sequences']} sequences of {row['context']}"),
    Kind("trace", "Traces: seconds", "seconds", "s", lambda row: str(row["trace"])),
    Kind("trace", "Traces: mean time to first token", "ttft_ms", "ms",
         lambda row: str(row["trace"])),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """One result.json."""

    label: str
    document: Mapping[str, Any]

    @property
    def plugins(self) -> frozenset[str]:
        """Names of the configurations in which the plug-in decides."""
        found = self.document["configurations"]
        return frozenset(one["name"] for one in found if one["plugin"]) - self.ways

    @property
    def ways(self) -> frozenset[str]:
        """Names of the configurations that force the plug-in to one way."""
        found = self.document["configurations"]
        return frozenset(one["name"] for one in found if one.get("pass_mode"))

    def rows(self, kind: Kind) -> Iterator[Mapping[str, Any]]:
        """The rows of a test that were measured."""
        for row in self.document["tests"].get(kind.test, ()):
            if row.get("configurations"):
                yield row


@dataclass(frozen=True, slots=True)
class Option:
    """One configuration on one batch or trace."""

    configuration: str
    plugin: bool
    value: float
    sweeps: Mapping[int, float]
    ran: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One batch or trace: who is faster."""

    name: str
    default: Option
    plugin: Option
    static: Option
    """The best that an operator could have by flags alone for this batch or trace; the default is
    among them."""

    def ratio(self, to: str) -> dict[str, Any] | None:
        """The plug-in over `default` or `static`, sweep by sweep."""
        other: Option = getattr(self, to)
        return ratio_of(self.plugin.sweeps, other.sweeps)

    def verdict(self, to: str) -> str:
        """`win`, `tie`, `loss` or `unsure`, of `ratio`."""
        return verdict_of(self.ratio(to))


@dataclass(frozen=True, slots=True)
class Contest:
    """All lines of one kind of test."""

    kind: Kind
    lines: tuple[Line, ...]

    def gain(self, to: str) -> float | None:
        """The geometric mean of the plug-in's ratios, minus one; negative is faster."""
        ratios = [ratio["median"] for line in self.lines if (ratio := line.ratio(to)) is not None]
        return exp(fmean(map(log, ratios))) - 1 if ratios else None

    def count(self, to: str) -> dict[str, int]:
        """How many lines are won, tied, lost and unsure."""
        verdicts = [line.verdict(to) for line in self.lines]
        return {name: verdicts.count(name) for name in ("win", "tie", "loss", "unsure")}


def read(path: Path, label: str = "") -> Engine:
    """The result at `path`; ValueError when it is no result of this schema."""
    document = json.loads(path.read_text())
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no {SCHEMA} document: {document.get('schema')}")
    return Engine(label or document["label"], document)


def contest_of(engine: Engine, kind: Kind) -> Contest:
    """Every row that was measured with the plug-in and by default."""
    found = ((row, list(_options(engine, row, kind))) for row in engine.rows(kind))
    lines = (_line(kind.name(row), options) for row, options in found)
    return Contest(kind, tuple(line for line in lines if line is not None))


def _options(engine: Engine, row: Mapping[str, Any], kind: Kind) -> Iterator[Option]:
    for name, found in row["configurations"].items():
        sweeps = {int(i): float(v) for i, v in found["sweeps"][kind.metric].items()}
        if sweeps and name not in engine.ways:
            ran = "; ".join(found.get("ran", ()))
            plugin = name in engine.plugins
            yield Option(name, plugin, median(sweeps.values()), sweeps, ran)


def _line(name: str, options: Sequence[Option]) -> Line | None:
    static = [one for one in options if not one.plugin]
    default = next((one for one in static if one.configuration == DEFAULT), None)
    plugin = min((o for o in options if o.plugin), key=lambda o: o.configuration, default=None)
    if default is None or plugin is None:
        return None
    return Line(name, default, plugin, min(static, key=lambda one: one.value))
