"""Prefill batches: each in every configuration by turns, in random order."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

from benchmarks.engine.cases import GRID, Case, cases_of, ragged_cases
from benchmarks.engine.configurations import DEFAULT, Configuration
from benchmarks.engine.paired import ratio_of, verdict_of
from benchmarks.engine.session import Pass, Session

__all__ = ["batches_of", "cached", "measure", "measure_loaded", "ran", "sampled", "sweeps"]

_COMPILING_MS = 1000.0
_MOST_ROWS = 2048
"""New tokens that decode graphs are tried with: more take them seconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request batch."""

    configuration: str
    sweep: int
    gpu_ms: float
    wall_ms: float
    split: tuple[tuple[tuple[int, int], ...], ...]
    """(prefix, new) of each sequence of each pass that it took."""
    ran: str
    host_ms: float
    peak_mib: int | None


def sweeps(
    configurations: Sequence[Configuration], repeat: int
) -> Iterable[tuple[int, Configuration]]:
    """(sweep, configuration): sweep 0 warms up; each has an order of its own."""
    for sweep in range(repeat + 1):
        for one in Random(sweep).sample(configurations, len(configurations)):
            yield sweep, one


def batches_of(options: argparse.Namespace) -> list[Case]:
    """The batches of a run."""
    cases = cases_of(options.grid or GRID)
    if options.batches:
        cases += ragged_cases(options.batches.read_text().splitlines())
    return cases


def measure(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """A row a batch. Those that an earlier call had time for are left out."""
    cases = [case for case in batches_of(options) if case not in session.measured]
    yield from _rows(session, options, cases, options.prefill_configurations)


def measure_loaded(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """The same for the first few batches, while other processes keep the host busy."""
    cases = batches_of(options)[: options.loaded_cases]
    with _busy(options.load):
        yield from _rows(session, options, cases, options.loaded_configurations)


@contextmanager
def _busy(processes: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def _rows(
    session: Session, options: argparse.Namespace, cases: Sequence[Case], names: str
) -> Iterable[dict[str, Any]]:
    for case in cases:
        if session.late:
            yield {"case": case.name, "skipped": "out of time"}
        elif case.tokens + sum(case.new) * 2 > session.capacity:
            yield {"case": case.name, "skipped": f"the KV pool holds {session.capacity} tokens"}
        else:
            named = session.named(case.only or names)
            row = _case(session, case, named, options.repeat, options.within)
            session.measured.add(case)
            print(_line(row), file=sys.stderr, flush=True)
            yield row


def cached(session: Session, case: Case) -> list[list[int]]:
    """Prefixes of a batch, which are in the cache then.

    Those of other batches begin alike, so that little of them is computed anew.
    """
    session.select(case.repeats)
    heads = [session.tokens(n, f"head {i}", case.repeats) for i, n in enumerate(case.prefix)]
    session.use(session.default)
    if any(heads):
        session.ask([head + session.tokens(1) for head in heads if head])
    return heads


def _case(
    session: Session,
    case: Case,
    configurations: Sequence[Configuration],
    repeat: int,
    within: float,
) -> dict[str, Any]:
    heads = cached(session, case)
    configurations = _runnable(session, case, heads, configurations)
    samples: list[Sample] = []
    hits = 0
    asked: dict[int, tuple[str, int, float]] = {}
    for sweep in range(repeat + 1):
        for configuration in Random(f"{case} {sweep}").sample(configurations, len(configurations)):
            session.use(configuration)
            tag = session.tag(memory=True)
            tails = [session.tokens(length, repeats=case.repeats) for length in case.new]
            wall_ms, found = session.ask([h + t for h, t in zip(heads, tails, strict=True)])
            hits = sum(one["meta_info"].get("cached_tokens", 0) for one in found)
            asked[tag] = (configuration.name, sweep, wall_ms)
        if sweep < 2 or sweep == repeat:
            samples += sampled(session.collect(), asked)
            asked.clear()
            # The first sweep may compile kernels: only what is slow by far is left out after it.
            configurations = _still(configurations, samples, within if sweep else 2 * within)
    row: dict[str, Any] = {"case": case.name, "prefix": list(case.prefix), "new": list(case.new)}
    row |= {"cached": hits, "as_asked": hits == sum(case.prefix)}
    return row | row_of([one for one in samples if one.sweep])


def _runnable(
    session: Session,
    case: Case,
    heads: Sequence[list[int]],
    configurations: Sequence[Configuration],
) -> list[Configuration]:
    """Those that no pass of a batch makes impossible: the first that forces a way tells."""
    ways: set[str] = set()
    for first in [one for one in configurations if one.pass_mode][:1]:
        session.use(first)
        tag = session.tag()
        session.ask([h + session.tokens(n) for h, n in zip(heads, case.new, strict=True)])
        ways = {
            way for one in session.collect() if one["tag"] == tag for way in one.get("ways", ())
        }
    if sum(case.new) > _MOST_ROWS:
        ways.discard("decode_graph")
    return [one for one in configurations if one.pass_mode is None or one.pass_mode in ways]


def _still(
    configurations: Sequence[Configuration], samples: Sequence[Sample], within: float
) -> list[Configuration]:
    """The configurations to go on with.

    Left out are the way that the plug-in took, and, if `within` is given, what took more than so
    many times the least (flags: of flags), unless it only ran once and may have compiled something.
    """
    kinds = {one.configuration: one.ran for one in samples}
    least_last = sorted(samples, key=lambda one: one.gpu_ms, reverse=True)
    took = {one.configuration: one.gpu_ms for one in least_last}
    flags = {one.name: took.get(one.name, 0.0) for one in configurations if not one.plugin}
    compiles = all(one.sweep == 0 for one in samples)
    taken = {kinds.get(one.name) for one in configurations if one.plugin and not one.pass_mode}

    def stays(one: Configuration) -> bool:
        ms, rivals = took.get(one.name, 0.0), took if one.plugin else flags
        most = within * min(rivals.values(), default=0.0) or float("inf")
        fast = ms <= most or (compiles and ms > _COMPILING_MS)
        if one.pass_mode:
            return fast and kinds.get(one.name) not in taken
        return fast or one.plugin or one.name == DEFAULT

    return [one for one in configurations if stays(one)]


def sampled(passes: Iterable[Pass], asked: Mapping[int, tuple[str, int, float]]) -> list[Sample]:
    """What each asked tag took; its passes of prefill are summed."""
    by_tag: dict[int, list[Pass]] = {}
    for one in passes:
        if one["tag"] in asked and one["mode"] == "EXTEND" and not one["draft"]:
            by_tag.setdefault(one["tag"], []).append(one)
    return [_sample(asked[tag], found) for tag, found in by_tag.items()]


def _sample(asked: tuple[str, int, float], passes: Sequence[Pass]) -> Sample:
    name, sweep, wall_ms = asked
    kinds = Counter(ran(one) for one in passes)
    text = ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in kinds.items())
    return Sample(
        name, sweep, sum(one["gpu_ms"] for one in passes), wall_ms,
        tuple(tuple(zip(one["prefix"], one["new"], strict=True)) for one in passes),
        text, sum(one["host_ms"] for one in passes),
        max((one["peak_mib"] for one in passes if "peak_mib" in one), default=None),
    )  # fmt: skip


def ran(one: Pass) -> str:
    """What a prefill pass ran, such as `mha eager`, `flashmla_sparse graph` or `decode_graph`."""
    if one.get("pass_mode", "engine") != "engine":
        return str(one["pass_mode"])
    return ("mha" if one["mha"] else one["impl"]) + (" graph" if one["graph"] else " eager")


def row_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """The figures of one batch: only samples that the scheduler split in the same way count."""
    if not samples:
        return {"error": "no pass was seen", "configurations": {}}
    usual = Counter(one.split for one in samples).most_common(1)[0][0]
    kept = [one for one in samples if one.split == usual]
    names = list(dict.fromkeys(one.configuration for one in kept))
    base = DEFAULT if DEFAULT in names else names[0]
    default = {one.sweep: one for one in kept if one.configuration == base}
    found = {
        name: _figures([o for o in kept if o.configuration == name], default) for name in names
    }
    return {"passes": len(usual), "dropped": len(samples) - len(kept), "configurations": found}


def _figures(samples: Sequence[Sample], default: Mapping[int, Sample]) -> dict[str, Any]:
    gpu_ms = {one.sweep: round(one.gpu_ms, 4) for one in samples}
    wall_ms = {one.sweep: round(one.wall_ms, 4) for one in samples}
    gpu = ratio_of(gpu_ms, {i: one.gpu_ms for i, one in default.items()})
    return {
        "gpu_ms": round(median(one.gpu_ms for one in samples), 4),
        "wall_ms": round(median(one.wall_ms for one in samples), 4),
        "host_ms": round(median(one.host_ms for one in samples), 4),
        "samples": len(samples), "ran": sorted({one.ran for one in samples}),
        "peak_mib": max((o.peak_mib for o in samples if o.peak_mib is not None), default=None),
        "gpu_ratio": gpu, "verdict": verdict_of(gpu),
        "sweeps": {"gpu_ms": gpu_ms, "wall_ms": wall_ms},
    }  # fmt: skip


def _line(row: Mapping[str, Any]) -> str:
    cells = [
        f"{name} {one['gpu_ms']:.2f} ({one['wall_ms']:.1f}; {'/'.join(one['ran'])}; "
        f"{one['verdict']})"
        for name, one in row["configurations"].items()
    ]
    odd = "" if row["as_asked"] else f"  cached {row['cached']}!"
    return f"prefill {row['case']}: " + " | ".join(cells) + odd
