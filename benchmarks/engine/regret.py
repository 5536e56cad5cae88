"""What the plug-in's choices cost against the best of all ways and flags, batch by batch.

    python -m benchmarks.engine.regret RESULT.json ... > page.md

Each RESULT.json is what `benchmarks.engine.run` wrote of batches with configurations that force a
way (`way:...`); engines of one label, one behind the other, are one table of each batch's last run.
A time is the median of its sweeps, which are too few to tell their scatter, so intervals (95 %) of
ratios take that of all batches that wait for the host, or of all that do not, or the batch's own
where it is larger. The best of many noisy times is too good by chance, so regret errs upwards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median

from benchmarks.engine.comparison import Engine, batch_name, read
from benchmarks.engine.configurations import DEFAULT
from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.formats.markdown import markdown_table

__all__ = ["Batch", "batches_of", "main", "page"]

_PLUGIN = "plugin"
_TOLERATED, _MOST_IDLE = 0.01, 0.05
_NORMAL = 1.96 * 1.2533
"""Standard errors of a median on either side."""
_DEVIATION, _RANGES = 1.4826, {2: 1.128, 3: 1.693, 4: 2.059}
"""A normal deviation by the median of absolute ones; the range of so many values by it."""
_WAITS = 0.85
_COLUMNS = (
    "batch", "default", "best flag", "plug-in", "it ran", "best of all", "regret",
    "against the default", "GPU idle: default", "plug-in",
)  # fmt: skip

Scatter = Mapping[bool, float]
"""The usual deviation of a ratio between sweeps, by whether batches wait for the host."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One batch in all its configurations: milliseconds by sweep."""

    name: str
    ran: str
    sweeps: Mapping[str, Mapping[str, float]]
    flags: frozenset[str]
    """SGLang's own configurations, the default among them."""
    waits: bool
    """Whether a pass of the default takes hardly longer than its host."""
    busy_ms: Mapping[str, float]
    """How long the GPU was at work, by configuration, where that was measured."""

    def ms(self, name: str) -> float:
        """The median time in a configuration."""
        return median(self.sweeps[name].values())

    @property
    def flag(self) -> str:
        """SGLang's best configuration."""
        return min(self.flags, key=self.ms)

    @property
    def best(self) -> str:
        """The best of all configurations and ways."""
        return min(self.sweeps, key=self.ms)

    @property
    def least_ms(self) -> float:
        """The best time; less where a profile says that the GPU waited."""
        return min([self.ms(self.best), *self.busy_ms.values()])

    def logs(self, to: str) -> list[float]:
        """Logarithms of the plug-in's times over those of `to`, sweep by sweep."""
        mine, others = self.sweeps[_PLUGIN], self.sweeps[to]
        return [log(mine[i] / others[i]) for i in mine.keys() & others.keys()]

    def ratio(self, to: str, scatter: Scatter) -> tuple[float, float, float]:
        """The plug-in over `to`, and the ends of its interval."""
        found = self.logs(to)
        own = (max(found) - min(found)) / _RANGES.get(len(found), 2.3)
        wide = 0 if to == _PLUGIN else _NORMAL * max(scatter[self.waits], own) / sqrt(len(found))
        return exp(median(found)), exp(median(found) - wide), exp(median(found) + wide)

    def idle(self, name: str) -> float | None:
        """The share of a pass in which the GPU had nothing to do; None where that is unknown."""
        return max(0.0, 1 - self.busy_ms[name] / self.ms(name)) if name in self.busy_ms else None


def batches_of(engines: Sequence[Engine], test: str) -> list[Batch]:
    """The batches of a test that the default and the plug-in have run, the last run of each."""
    found: dict[str, Batch] = {}
    for engine in engines:
        busy: dict[str, dict[str, float]] = {}
        for row in engine.document["tests"].get("profile", ()):
            if row.get("busy_ms"):
                busy.setdefault(batch_name(row), {})[row["configuration"]] = row["busy_ms"]
        for row in engine.document["tests"].get(test, ()):
            measured = row.get("configurations", {})
            if {DEFAULT, _PLUGIN} <= measured.keys():
                default, ran = measured[DEFAULT], "; ".join(measured[_PLUGIN]["ran"])
                times = {name: one["sweeps"]["gpu_ms"] for name, one in measured.items()}
                name, flags = batch_name(row), frozenset(times) - engine.plugins - engine.ways
                waits = default["host_ms"] > _WAITS * default["gpu_ms"]
                found[name] = Batch(name, ran, times, flags, waits, busy.get(name, {}))
    return list(found.values())


def _scatter(batches: Sequence[Batch]) -> Scatter:
    rests: dict[bool, list[float]] = {False: [0.0], True: [0.0]}
    for batch in batches:
        logs = batch.logs(DEFAULT)
        scale = sqrt(len(logs) / max(len(logs) - 1, 1))
        rests[batch.waits] += [scale * abs(one - fmean(logs)) for one in logs]
    return {waits: _DEVIATION * median(found) for waits, found in rests.items()}


def page(engines: Sequence[Engine]) -> Iterator[str]:
    """What the random batches of engines that are alike say, in Markdown."""
    for test in ("prefill", "loaded"):
        batches = batches_of(engines, test)
        if batches:
            scatter = _scatter(batches)
            rows = sorted(batches, key=lambda one: one.ms(one.best) / one.ms(_PLUGIN))
            yield f"## {engines[0].label}, {len(batches)} batches ({test})"
            yield "\n".join(f"- {line}" for line in _summary(batches, scatter))
            yield markdown_table(DisplayTable("", _COLUMNS, tuple(_row(b, scatter) for b in rows)))


def _summary(batches: Sequence[Batch], scatter: Scatter) -> Iterator[str]:
    regrets = {batch: batch.ratio(batch.best, scatter)[0] - 1 for batch in batches}
    worst = max(batches, key=lambda batch: regrets[batch])
    yield (
        f"regret against the best of all ways and flags: mean {fmean(regrets.values()):.1%}, worst "
        f"{regrets[worst]:.1%} ({worst.name})"
    )
    for name, to in (("the default", lambda _: DEFAULT), ("its best flag", lambda one: one.flag)):
        ratios = {batch: batch.ratio(to(batch), scatter) for batch in batches}
        mean = exp(fmean(log(middle) for middle, _, _ in ratios.values())) - 1
        total = sum(one.ms(_PLUGIN) for one in batches) / sum(one.ms(to(one)) for one in batches)
        slower = [batch.name for batch, (_, low, _) in ratios.items() if low > 1 + _TOLERATED]
        least = exp(fmean(log(one.least_ms / one.ms(to(one))) for one in batches)) - 1
        yield (
            f"against {name}: {mean:+.1%} a batch (geometric mean; {least:+.1%} by the fastest way "
            f"if the GPU never waited), {total - 1:+.1%} in sum; "
            f"more than 1 % slower beyond the interval: {len(slower)} {slower or ''}"
        )
    for name in (DEFAULT, _PLUGIN):
        idle = [share for batch in batches if (share := batch.idle(name)) is not None]
        if idle:
            yield (
                f"GPU idle, {name}: mean {fmean(idle):.1%}, worst {max(idle):.1%}, over 5 % in "
                f"{sum(share > _MOST_IDLE for share in idle)} of {len(idle)} batches"
            )
    yield f"ratios scatter by {scatter[False]:.2%}; behind a slow host by {scatter[True]:.2%}"


def _row(batch: Batch, scatter: Scatter) -> tuple[str, ...]:
    regret, to_default = (
        "{:+.1f} % ({:+.1f} to {:+.1f})".format(*(100 * (x - 1) for x in batch.ratio(to, scatter)))
        for to in (batch.best, DEFAULT)
    )
    idle = ("" if (x := batch.idle(name)) is None else f"{x:.0%}" for name in (DEFAULT, _PLUGIN))
    flag, best = batch.flag, batch.best
    return (
        batch.name, _ms(batch.ms(DEFAULT)), f"{_ms(batch.ms(flag))} {flag}",
        _ms(batch.ms(_PLUGIN)), batch.ran, f"{_ms(batch.ms(best))} {best.removeprefix('way:')}",
        regret, to_default, *idle,
    )  # fmt: skip


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def main(arguments: list[str] | None = None) -> int:
    """Print the page; 1 where a batch is slower than the default beyond its interval."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    engines = [read(path) for path in parser.parse_args(arguments).results]
    alike = [list(some) for _, some in groupby(engines, lambda engine: engine.label)]
    sys.stdout.write("\n\n".join(part for some in alike for part in page(some)) + "\n")
    found = [batches_of(some, "prefill") for some in alike]
    lows = (b.ratio(DEFAULT, _scatter(batches))[1] for batches in found for b in batches)
    return int(any(low > 1 + _TOLERATED for low in lows))


if __name__ == "__main__":
    sys.exit(main())
