"""What one or more engines' results say: the plug-in beside the default and the best static flags.

Within one engine samples are paired by sweep. Engines that were started separately are not: there
the interval of a ratio of medians comes from resampling both sides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from benchmarks.engine.configurations import DEFAULT
from benchmarks.engine.paired import ratio_of, verdict_of
from benchmarks.engine.run import SCHEMA

__all__ = [
    "KINDS",
    "Contest",
    "Engine",
    "Line",
    "Option",
    "batch_name",
    "contest_of",
    "read",
    "unpaired_ratio",
]

_RESAMPLES = 2000


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

    @property
    def captured_by_plugin(self) -> bool:
        """Whether the plug-in decided while CUDA graphs were captured; decode replays those."""
        return self.document["started_as"] in self.plugins

    def rows(self, kind: Kind) -> Iterator[Mapping[str, Any]]:
        """The rows of a test that were measured."""
        for row in self.document["tests"].get(kind.test, ()):
            if row.get("configurations"):
                yield row


@dataclass(frozen=True, slots=True)
class Option:
    """One configuration of one engine on one batch or trace."""

    engine: str
    configuration: str
    plugin: bool
    value: float
    sweeps: Mapping[int, float]
    ran: str = ""

    def over(self, other: Option) -> dict[str, Any] | None:
        """This option's time over the other's: paired in one engine, resampled across engines."""
        if self.engine == other.engine:
            return ratio_of(self.sweeps, other.sweeps)
        return unpaired_ratio(list(self.sweeps.values()), list(other.sweeps.values()))


@dataclass(frozen=True, slots=True)
class Line:
    """One batch or trace: who is faster."""

    name: str
    default: Option
    plugin: Option
    static: Option
    """The best that an operator could have by flags alone for this batch or trace; the default is
    among them."""
    overall: Option | None
    """The one static configuration that is best over all lines, on this line."""
    options: tuple[Option, ...]

    def ratio(self, to: str) -> dict[str, Any] | None:
        """The plug-in over `default`, `static` or `overall`."""
        other: Option | None = getattr(self, to)
        return None if other is None else self.plugin.over(other)

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
    """The result at `path`.

    Raises:
        ValueError: when it is no result of this schema.
    """
    document = json.loads(path.read_text())
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no {SCHEMA} document: {document.get('schema')}")
    return Engine(label or document["label"], document)


def contest_of(engines: Sequence[Engine], kind: Kind, of: Engine) -> Contest:
    """Every batch that was measured with the plug-in of one engine, against all of `engines`.

    The default is that of the first of `engines` which has the batch.
    """
    by_name: dict[str, list[Option]] = {}
    for engine in engines:
        others = kind.test != "decode" or not _has_own_graphs(engine, engines)
        for row in engine.rows(kind):
            options = [one for one in _options(engine, row, kind) if one.plugin or others]
            by_name.setdefault(kind.name(row), []).extend(options)
    overall = _overall(by_name.values())
    lines = (_line(name, options, of, overall) for name, options in by_name.items())
    return Contest(kind, tuple(line for line in lines if line is not None))


def _has_own_graphs(engine: Engine, engines: Sequence[Engine]) -> bool:
    """Whether another engine shows what decode takes in graphs that SGLang captured by itself.

    Then what this one takes with the plug-in off is no evidence: it replays the plug-in's graphs.
    """
    dtype = engine.document["kv_dtype"]
    return engine.captured_by_plugin and any(
        not one.captured_by_plugin and one.document["kv_dtype"] == dtype for one in engines
    )


def _options(engine: Engine, row: Mapping[str, Any], kind: Kind) -> Iterator[Option]:
    for name, found in row["configurations"].items():
        sweeps = {int(i): float(v) for i, v in found["sweeps"][kind.metric].items()}
        if sweeps and name not in engine.ways:
            ran = "; ".join(found.get("ran", ()))
            plugin = name in engine.plugins
            yield Option(engine.label, name, plugin, median(sweeps.values()), sweeps, ran)


def _line(
    name: str, options: Sequence[Option], of: Engine, overall: tuple[str, str] | None
) -> Line | None:
    static = [one for one in options if not one.plugin]
    default = next((one for one in static if one.configuration == DEFAULT), None)
    plugin = next((one for one in options if one.plugin and one.engine == of.label), None)
    if default is None or plugin is None:
        return None
    return Line(
        name,
        default,
        plugin,
        min(static, key=lambda one: one.value),
        next((one for one in static if (one.engine, one.configuration) == overall), None),
        tuple(options),
    )


def _overall(lines: Iterable[Sequence[Option]]) -> tuple[str, str] | None:
    """The static configuration with the least geometric mean over the lines that all have."""
    logs: dict[tuple[str, str], list[float]] = {}
    for options in lines:
        for one in options:
            if not one.plugin:
                logs.setdefault((one.engine, one.configuration), []).append(log(one.value))
    most = max((len(found) for found in logs.values()), default=0)
    complete = {one: fmean(found) for one, found in logs.items() if len(found) == most}
    return min(complete, key=lambda one: complete[one], default=None)


def unpaired_ratio(
    values: Sequence[float], others: Sequence[float], seed: int = 1
) -> dict[str, Any] | None:
    """The ratio of two medians, with a 95 % interval by resampling both sides.

    The interval is None where a side has fewer than six values.
    """
    if not values or not others:
        return None
    middle = round(median(values) / median(others), 5)
    if min(len(values), len(others)) < 6:
        return {"median": middle, "interval": None, "pairs": 0}
    random = Random(seed)
    found = sorted(
        median(random.choices(values, k=len(values)))
        / median(random.choices(others, k=len(others)))
        for _ in range(_RESAMPLES)
    )
    low, high = found[round(0.025 * _RESAMPLES)], found[round(0.975 * _RESAMPLES) - 1]
    return {"median": middle, "interval": [round(low, 5), round(high, 5)], "pairs": 0}
