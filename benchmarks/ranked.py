"""Whole passes priced against measured ones, and configurations ranked by both.

    python -m benchmarks.ranked OUT... --pass-times FILE... [--rest FILE...] [--json FILE]

OUT is the folder of one run of `benchmarks.engine.run`: its result.json and passes.jsonl. The files
are as for `nsa-tune replay`: pass times that the plug-in measured in the same engine, and what a
pass takes besides attention, for each KV format of the runs. Where there are as many files of pass
times as runs, each run takes its own, in their order. Heads, KV format, layers and GPU are those of
a run.

1. Passes: what `nsa-tune replay` says that a prefill takes, over what the engine took for it, minus
   one. Of equal passes the median counts, the first of them left out, as it may have compiled. A
   pass of `plugin` is priced in the way that it ran. "the same pass again" is what the engine took
   for the last of equal passes, over the one before it, minus one: no price can be nearer.
2. Configurations over the batches of the harness's test of prefill: the sum of what each batch took
   (its median), and of its prices. Only batches count that every configuration has both for.
3. Configurations over its traces: what the prefills of a configuration's own replay took, and the
   prices of the default's passes, as `nsa-tune replay` knows no other.
4. Of several runs of one KV format, 1 and 2 for all of them together; of both KV formats, the
   configurations of both, over the batches that each has.

`plugin` is priced by what the plug-in decides today; the run may be of an older one. How often it
decides otherwise is said.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from benchmarks.priced import batch_of, lines_of, spread, told
from nsa_tune import Batch, Dispatcher
from nsa_tune._cli.traffic.options import release_named
from nsa_tune._cli.traffic.prices import pricer_for, refused, whole_prefills
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.steering.choice import bucket
from nsa_tune.reports.replay.flags import PREFILL_FLAG
from nsa_tune.reports.replay.prices import Pricer
from nsa_tune.reports.replay.rest import RestOfPass
from nsa_tune.reports.replay.whole_prefills import (
    EAGER,
    ENGINE,
    PLUGIN,
    Basis,
    Took,
    WholePrefills,
)

SCHEMA = "nsa-tune/ranked/1"
_HOST_BOUND = 1.1
"""GPU time over host time below which a pass may have waited for its host."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Equal prefills of one configuration."""

    configuration: str
    batch: Batch
    way: str
    graph: bool
    gpu_ms: float
    host_ms: float
    again: float | None = None
    """The time of the last one over that of the one before it, minus one; None of a single one."""

    @property
    def waited(self) -> bool:
        """Whether the GPU may have waited for the host."""
        return self.gpu_ms < _HOST_BOUND * self.host_ms


class Prices:
    """Prices of whole prefills, kept by batch."""

    def __init__(self, pricer: Pricer, whole: WholePrefills) -> None:
        self.whole = whole
        self._pricer = pricer
        self._kept: dict[Batch, dict[str, Took]] = {}

    def of(self, batch: Batch) -> dict[str, Took]:
        """By setup."""
        if batch not in self._kept:
            graph = bucket(self.whole.choice.sizes, batch.q_tokens) is not None
            price = self._pricer.price(batch, graph=graph)
            self._kept[batch] = self.whole.took(batch, price, graph=graph)
        return self._kept[batch]

    def as_ran(self, one: Ran) -> Took | None:
        """What a pass takes in the way that it ran; None without a price."""
        plugin = one.configuration == "plugin"
        setup = self.of(one.batch)[PLUGIN if plugin else ENGINE]
        us = self.whole.estimates_us(one.batch).get(PassMode(one.way)) if plugin else None
        if us is not None:
            return Took(one.way, us, Basis.MEASURED)
        return setup if setup.basis is not Basis.NONE and alike(setup.way, one.way) else None


# The table's kernel is SGLang's own way where it is the same.
_USUAL = (PassMode.ENGINE, PassMode.TABLE_KERNEL)


def alike(way: str, other: str) -> bool:
    """Whether two ways may be the same."""
    return way == other or (way in _USUAL and other in _USUAL)


def setup_of(configuration: Mapping[str, Any]) -> str | None:
    """The setup that `nsa-tune replay` prices for a configuration of the harness."""
    if configuration.get("pass_mode") or configuration.get("environment"):
        return None
    if configuration["plugin"]:
        return PLUGIN
    if not configuration["prefill_graph"]:
        return EAGER
    kernel = configuration.get("prefill_impl")
    return ENGINE if kernel is None else f"{PREFILL_FLAG} {kernel}"


def _prefills(folder: Path) -> Iterator[dict[str, Any]]:
    for line in lines_of(folder / "passes.jsonl"):
        if line["mode"] == "EXTEND" and not line.get("draft") and line.get("gpu_ms"):
            yield line


def ran(lines: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[Ran]:
    """The prefills of a run, equal ones as one."""
    groups: dict[tuple[str, Batch, str, bool], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        batch = batch_of(line)
        if batch is not None:
            way = str(line.get("pass_mode", PassMode.ENGINE))
            groups[names[line["ctl"]], batch, way, bool(line["graph"])].append(line)
    return [
        Ran(
            *key,
            median(float(one["gpu_ms"]) for one in found[1:] or found),
            median(float(one["host_ms"]) for one in found[1:] or found),
            found[-1]["gpu_ms"] / found[-2]["gpu_ms"] - 1 if len(found) > 1 else None,
        )
        for key, found in groups.items()
    ]


# --- passes


Priced: TypeAlias = tuple[Ran, Took | None]
"""Equal prefills, and their price; None without one."""


def errors_of(passes: Sequence[Priced]) -> dict[str, dict[str, Any]]:
    """By configuration: the spread of all errors, and by what a price rests on, by way, and by
    whether the GPU waited."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("default", "plugin"):
        own = [(one, took) for one, took in passes if one.configuration == name]
        priced = [(one, took) for one, took in own if took is not None]
        errors = [(one, took, took.us / 1e3 / one.gpu_ms - 1) for one, took in priced]
        parts: dict[str, list[float]] = defaultdict(list)
        for one, took, error in errors:
            parts["by times of passes" if took.basis is not Basis.REST else "by the rest"].append(
                error
            )
            parts[f"way {one.way}"].append(error)
            parts["GPU waited for the host" if one.waited else "GPU did not wait"].append(error)
        found[name] = {
            "all": spread(error for *_, error in errors),
            "not_priced": len(own) - len(priced),
            "again": spread(one.again for one, _ in own if one.again is not None),
            "parts": {part: spread(some) for part, some in sorted(parts.items())},
        }
    return found


def decided_alike(passes: Sequence[Ran], prices: Prices) -> tuple[int, int]:
    """Passes of `plugin` for which the plug-in takes the same way today, of how many."""
    own = [one for one in passes if one.configuration == "plugin"]
    return sum(alike(prices.of(one.batch)[PLUGIN].way, one.way) for one in own), len(own)


# --- rankings


@dataclass(frozen=True, slots=True)
class Ranking:
    """Configurations by what they take."""

    what: str
    measured_ms: Mapping[str, float]
    priced_ms: Mapping[str, float]

    @property
    def orders(self) -> tuple[list[str], list[str]]:
        """Measured and priced, the fastest first."""
        measured = sorted(self.measured_ms, key=self.measured_ms.__getitem__)
        return measured, sorted(measured, key=self.priced_ms.__getitem__)

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        measured, priced = self.orders
        yield f"{self.what}: measured {' < '.join(measured)}"
        yield f"{' ' * len(self.what)}  priced   {' < '.join(priced)}"
        for name in measured:
            took, price = self.measured_ms[name], self.priced_ms[name]
            yield f"  {name:<18}{took:9.1f} ms  priced {price:9.1f} ms  {price / took - 1:+.1%}"
        pairs = list(combinations(measured, 2))
        right = sum(self.priced_ms[one] <= self.priced_ms[other] for one, other in pairs)
        yield f"  {right} of {len(pairs)} pairs in the measured order"

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "what": self.what, "measured_ms": dict(self.measured_ms),
            "priced_ms": dict(self.priced_ms), "agree": self.orders[0] == self.orders[1],
        }  # fmt: skip


Times: TypeAlias = Mapping[str, tuple[float, float]]
"""By configuration: what a batch took, and its price, in milliseconds."""


def batches_of(
    rows: Iterable[Mapping[str, Any]], setups: Mapping[str, str], prices: Prices
) -> dict[str, Times]:
    """The batches that all configurations have a time and a price for, by case."""
    found: dict[str, Times] = {}
    for row in rows:
        own = row.get("configurations", {})
        # The lengths of a batch that the scheduler split are not those of its passes.
        if row.get("passes") != 1 or not row.get("as_asked") or setups.keys() - own.keys():
            continue
        took = prices.of(Batch.extend(row["prefix"], row["new"]))
        if all(took[setup].basis is not Basis.NONE for setup in setups.values()):
            found[row["case"]] = {
                name: (own[name]["gpu_ms"], took[setup].us / 1e3) for name, setup in setups.items()
            }
    return found


def over_batches(found: Mapping[str, Times], what: str) -> Ranking | None:
    """The configurations over batches; None without any."""
    measured: dict[str, float] = defaultdict(float)
    priced: dict[str, float] = defaultdict(float)
    for times in found.values():
        for name, (took_ms, price_ms) in times.items():
            measured[name] += took_ms
            priced[name] += price_ms
    return Ranking(f"{len(found)} batches{what}", measured, priced) if found else None


def over_trace(
    trace: Mapping[str, Any],
    passes: Mapping[int, Sequence[Mapping[str, Any]]],
    setups: Mapping[str, str],
    prices: Prices,
) -> Ranking | None:
    """The configurations over a trace; None where its passes are not found, or lack a price."""
    runs: dict[str, list[float]] = defaultdict(list)
    batches: list[list[Batch]] = []
    for run in trace.get("runs", ()):
        name = run["configuration"]
        if name in setups:
            runs[name].append(run["prefill_gpu_ms"])
        if name == "default":
            batches += _passes_of(run, passes)
    if not batches or len(runs) < 2:
        return None
    took = [[prices.of(batch) for batch in own] for own in batches]
    known = [
        one
        for own in took
        for one in own
        if all(one[setups[name]].basis is not Basis.NONE for name in runs)
    ]
    every = sum(map(len, took))
    if len(known) != every:
        return None
    priced = {
        name: sum(one[setups[name]].us for one in known) / 1e3 / len(batches) for name in runs
    }
    what = f"trace {trace['trace']}, {every} passes"
    return Ranking(what, {name: median(times) for name, times in runs.items()}, priced)


def _passes_of(
    run: Mapping[str, Any], passes: Mapping[int, Sequence[Mapping[str, Any]]]
) -> Iterator[list[Batch]]:
    """The passes of one replay: those of one tag that add up to what the run reports."""
    for own in passes.values():
        total = sum(one["gpu_ms"] for one in own)
        if len(own) == run["prefill_passes"] and abs(total - run["prefill_gpu_ms"]) < 0.02:
            batches = [batch_of(one) for one in own]
            if None not in batches:
                yield [one for one in batches if one is not None]
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--pass-times", type=Path, nargs="+", required=True)
    parser.add_argument("--rest", type=Path, nargs="+", default=[])
    parser.add_argument("--db", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    documents = []
    runs: dict[str, list[tuple[dict[str, Times], list[Priced]]]] = defaultdict(list)
    for number, folder in enumerate(given.runs):
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        files = given.pass_times
        own = [files[number]] if len(files) == len(given.runs) else files
        document, times, passes = compared(folder, result, _prices(given, result, own))
        documents.append(document)
        runs[result["kv_dtype"]].append((times, passes))
    pooled = {kv: _together(kv, some) for kv, some in runs.items() if len(some) > 1}
    batches = {kv: _merged(one for one, _ in some) for kv, some in runs.items()}
    every = over_batches(_joined(batches), " of all runs") if len(batches) > 1 else None
    if len(batches) > 1:
        _show(every)
    if given.json is not None:
        found = {
            "schema": SCHEMA, "runs": documents, "by_kv_dtype": pooled,
            "all_runs": None if every is None else every.document(),
        }  # fmt: skip
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _together(
    kv_dtype: str, runs: Sequence[tuple[Mapping[str, Times], Sequence[Priced]]]
) -> dict[str, Any]:
    """Print what all runs of one KV format say together; return it."""
    print(f"{kv_dtype}, {len(runs)} runs together")
    errors = errors_of([one for _, passes in runs for one in passes])
    _show_errors(errors)
    ranking = over_batches(_merged(batches for batches, _ in runs), f", {kv_dtype}")
    _show(ranking)
    return {"passes": errors, "ranking": None if ranking is None else ranking.document()}


def _merged(runs: Iterable[Mapping[str, Times]]) -> dict[str, Times]:
    """The batches of several runs; of one that several have, the last run's counts. Only batches
    with every configuration."""
    found = {case: times for batches in runs for case, times in batches.items()}
    names = {name for times in found.values() for name in times}
    return {case: times for case, times in found.items() if times.keys() == names}


def _prices(
    given: argparse.Namespace, result: Mapping[str, Any], pass_times: Sequence[Path]
) -> Prices:
    """What prices the passes of a run.

    Raises:
        UsageError: when none of the files is of its engine.
    """
    options, kv_dtype = result["options"], result["kv_dtype"]
    dispatcher = Dispatcher.open(
        given.db, result["gpu"]["name"], model=options.get("model", "deepseek-v3.2"),
        heads=options["heads"], kv_dtype=kv_dtype, layers=options.get("as_layers"),
    )  # fmt: skip
    pricer, _ = pricer_for(dispatcher, release_named(None), given.db)
    whole = whole_prefills(pass_times, pricer, RestOfPass.read_for(given.rest, kv_dtype))
    if whole is None:
        raise refused(pass_times, pricer)
    return Prices(pricer, whole)


def _joined(runs: Mapping[str, Mapping[str, Times]]) -> dict[str, Times]:
    """By case, the configurations of all runs."""
    first, *others = runs.values()
    cases = [case for case in first if all(case in own for own in others)]
    return {
        case: {f"{kv} {name}": one for kv, own in runs.items() for name, one in own[case].items()}
        for case in cases
    }


def _show(ranking: Ranking | None) -> None:
    for text in ranking.lines() if ranking is not None else ("nothing to rank",):
        print(text)


def _show_errors(errors: Mapping[str, Mapping[str, Any]]) -> None:
    for name, found in errors.items():
        print(told(f"{name}, whole prefills", found["all"]))
        for part, some in found["parts"].items():
            print(f"  {told(part, some)}")
        print(f"  {told('the same pass again', found['again'])}")
        print(f"  {found['not_priced']} not priced")


def compared(
    folder: Path, result: Mapping[str, Any], prices: Prices
) -> tuple[dict[str, Any], dict[str, Times], list[Priced]]:
    """Print all comparisons of a run; return them, its batches and its passes."""
    print(f"{result['label']}; pass times: {prices.whole.source}")
    lines = list(_prefills(folder))
    names = [one["name"] for one in result["configurations"]]
    setups = {one["name"]: setup_of(one) for one in result["configurations"]}
    known = {
        name: setup
        for name, setup in setups.items()
        if setup is not None and setup in prices.whole.setups
    }
    passes = ran(lines, names)
    priced = [(one, prices.as_ran(one)) for one in passes]
    errors = errors_of(priced)
    _show_errors(errors)
    same, every = decided_alike(passes, prices)
    print(f"the plug-in takes the same way today for {same} of {every} different passes")
    tags: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        tags[line["tag"]].append(line)
    tests = result["tests"]
    batches = batches_of(tests.get("prefill", ()), known, prices)
    rankings = [over_batches(batches, "")]
    rankings += [over_trace(one, tags, known, prices) for one in tests.get("trace", ())]
    shown = [one for one in rankings if one is not None]
    for one in shown:
        _show(one)
    document = {
        "label": result["label"], "source": prices.whole.source, "passes": errors,
        "decided_alike": {"passes": same, "of": every},
        "rankings": [one.document() for one in shown],
    }  # fmt: skip
    return document, batches, priced


if __name__ == "__main__":
    sys.exit(main())
