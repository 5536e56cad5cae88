"""What the plug-in's choices cost against the best of all ways and flags, batch by batch.

    python -m benchmarks.engine.regret RESULT.json ... [--batches FILE] > page.md

Each RESULT.json is what `benchmarks.engine.run` wrote of batches with configurations that force a
way (`way:...`). A time is the median of its sweeps. Few sweeps of one batch tell little of their
scatter, so intervals (95 %) of ratios take that of all batches that wait for the host, or of all
that do not, or the batch's own where it is larger. The best of many noisy times is too good by
chance, so regret errs upwards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median

from benchmarks.engine.cases import Case, ragged_cases
from benchmarks.engine.comparison import Engine, batch_name, read
from benchmarks.engine.configurations import DEFAULT
from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.formats.markdown import markdown_table

__all__ = ["Batch", "batches_of", "main", "page"]

_TOLERATED = 0.01
_NORMAL = 1.96 * 1.2533
"""Standard errors of a median on either side."""
_DEVIATION = 1.4826
"""A normal deviation by the median of absolute ones."""
_WAITS = 0.85
_RANGE_OF_3 = 1.693
"""What the range of three normal values is of their deviation."""
_COLUMNS = (
    "batch", "default", "best flag", "plug-in", "it ran", "best of all", "regret",
    "against the default", "GPU idle: default", "plug-in",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch in all its configurations: milliseconds by sweep."""

    name: str
    ran: str
    sweeps: Mapping[str, Mapping[str, float]]
    statics: frozenset[str]
    plugin: str
    waits: bool
    """Whether a pass of the default takes hardly longer than its host."""
    busy_ms: Mapping[str, float]
    """How long the GPU was at work, by configuration; 0 where that was not measured."""

    def ms(self, name: str) -> float:
        """The median time in a configuration."""
        return median(self.sweeps[name].values())

    @property
    def flag(self) -> str:
        """SGLang's best configuration, the default among them."""
        return min(self.statics, key=self.ms)

    @property
    def best(self) -> str:
        """The best of all configurations and ways."""
        return min(self.sweeps, key=self.ms)

    def logs(self, to: str) -> list[float]:
        """Logarithms of the plug-in's times over those of `to`, sweep by sweep."""
        mine, others = self.sweeps[self.plugin], self.sweeps[to]
        return [log(mine[i] / others[i]) for i in mine.keys() & others.keys()]

    def ratio(self, to: str, scatter: Mapping[bool, float]) -> tuple[float, float, float]:
        """The plug-in over `to`, and the ends of its interval."""
        found = self.logs(to)
        middle = median(found)
        own = (max(found) - min(found)) / _RANGE_OF_3
        wide = (
            0.0 if to == self.plugin else _NORMAL * max(scatter[self.waits], own) / sqrt(len(found))
        )
        return exp(middle), exp(middle - wide), exp(middle + wide)

    def idle(self, name: str) -> float | None:
        """The share of a pass in which the GPU had nothing to do; None where that is unknown."""
        busy_ms = self.busy_ms.get(name)
        return None if not busy_ms else max(0.0, 1 - busy_ms / self.ms(name))


def batches_of(engine: Engine, only: frozenset[Case] | None, test: str) -> list[Batch]:
    """The batches of a test that the default and the plug-in have run."""
    (plugin,) = {one for one in engine.plugins if "+" not in one} or {"plugin"}
    busy = {
        (tuple(row["prefix"]), tuple(row["new"]), row["configuration"]): float(row["busy_ms"])
        for row in engine.document["tests"].get("profile", ())
        if "busy_ms" in row
    }
    found = []
    for row in engine.document["tests"].get(test, ()):
        times = {
            name: one["sweeps"]["gpu_ms"]
            for name, one in row.get("configurations", {}).items()
            if one["sweeps"]["gpu_ms"]
        }
        if not {DEFAULT, plugin} <= times.keys():
            continue
        case = Case(tuple(row["prefix"]), tuple(row["new"]))
        if only is None or case in only:
            ran = "; ".join(row["configurations"][plugin]["ran"])
            statics = frozenset(times) - engine.plugins - engine.ways
            idle = {name: busy.get((case.prefix, case.new, name), 0.0) for name in times}
            default = row["configurations"][DEFAULT]
            waits = default["host_ms"] > _WAITS * default["gpu_ms"]
            found.append(Batch(batch_name(row), ran, times, statics, plugin, waits, idle))
    return found


def _scatter(batches: Sequence[Batch]) -> dict[bool, float]:
    """The usual deviation of a ratio between sweeps, by `waits`, whatever the outliers are."""
    rests: dict[bool, list[float]] = {False: [], True: []}
    for batch in batches:
        logs = batch.logs(DEFAULT)
        scale = sqrt(len(logs) / max(len(logs) - 1, 1))
        rests[batch.waits] += [scale * abs(one - fmean(logs)) for one in logs]
    return {waits: _DEVIATION * median(found or [0.0]) for waits, found in rests.items()}


def page(engine: Engine, only: frozenset[Case] | None = None) -> Iterator[str]:
    """What one engine's random batches say, in Markdown."""
    for test in ("prefill", "loaded"):
        batches = batches_of(engine, only, test)
        if batches:
            scatter = _scatter(batches)
            rows = sorted(batches, key=lambda one: one.ms(one.best) / one.ms(one.plugin))
            shown = tuple(_row(one, scatter) for one in rows)
            yield f"## {engine.label}, {len(batches)} batches ({test})"
            yield "\n".join(f"- {line}" for line in _summary(batches, scatter))
            yield markdown_table(DisplayTable("", _COLUMNS, shown, frozenset()))


def _summary(batches: Sequence[Batch], scatter: Mapping[bool, float]) -> Iterator[str]:
    regrets = [batch.ms(batch.plugin) / batch.ms(batch.best) - 1 for batch in batches]
    worst = batches[regrets.index(max(regrets))]
    yield (
        f"regret against the best of all ways and flags: mean {fmean(regrets):.1%}, worst "
        f"{max(regrets):.1%} ({worst.name})"
    )
    for name, to in (("the default", lambda _: DEFAULT), ("its best flag", lambda one: one.flag)):
        ratios = [batch.ratio(to(batch), scatter) for batch in batches]
        mean = exp(fmean(log(middle) for middle, _, _ in ratios)) - 1
        total = sum(one.ms(one.plugin) for one in batches) / sum(one.ms(to(one)) for one in batches)
        slower = [
            batch.name
            for batch, (_, low, _) in zip(batches, ratios, strict=True)
            if low > 1 + _TOLERATED
        ]
        yield (
            f"against {name}: {mean:+.1%} a batch (geometric mean), {total - 1:+.1%} in sum; "
            f"more than 1 % slower beyond the interval: {len(slower)} {slower or ''}"
        )
    for name in (DEFAULT, batches[0].plugin):
        idle = [share for batch in batches if (share := batch.idle(name)) is not None]
        if idle:
            over = sum(share > 0.05 for share in idle)
            yield (
                f"GPU idle, {name}: mean {fmean(idle):.1%}, worst {max(idle):.1%}, over 5 % in "
                f"{over} of {len(idle)} batches"
            )
    yield (
        f"deviation of a ratio between sweeps: {scatter[False]:.2%}, where the host is waited for "
        f"{scatter[True]:.2%}"
    )


def _row(batch: Batch, scatter: Mapping[bool, float]) -> tuple[str, ...]:
    regret, to_default = (batch.ratio(to, scatter) for to in (batch.best, DEFAULT))
    return (
        batch.name, _ms(batch.ms(DEFAULT)), f"{_ms(batch.ms(batch.flag))} {batch.flag}",
        _ms(batch.ms(batch.plugin)), batch.ran,
        f"{_ms(batch.ms(batch.best))} {batch.best.removeprefix('way:')}",
        _percent(regret), _percent(to_default),
        *(_share(batch.idle(name)) for name in (DEFAULT, batch.plugin)),
    )  # fmt: skip


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _percent(ratio: tuple[float, float, float]) -> str:
    middle, low, high = (f"{100 * (one - 1):+.1f}" for one in ratio)
    return f"{middle} % ({low} to {high})"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def main(arguments: list[str] | None = None) -> int:
    """Print the page; 1 where a batch is slower than the default beyond its interval."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--batches", type=Path, help="only those of this file")
    options = parser.parse_args(arguments)
    only = None
    if options.batches:
        only = frozenset(ragged_cases(options.batches.read_text(encoding="utf-8").splitlines()))
    lost = False
    for path in options.results:
        engine = read(path)
        sys.stdout.write("\n\n".join(page(engine, only)) + "\n")
        batches = batches_of(engine, only, "prefill")
        scatter = _scatter(batches)
        lost |= any(one.ratio(DEFAULT, scatter)[1] > 1 + _TOLERATED for one in batches)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
