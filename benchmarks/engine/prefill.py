"""Prefill batches: each in every configuration by turns, forward and in reverse."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.engine.cases import GRID, Case, cases_of, ragged_cases
from benchmarks.engine.configurations import DEFAULT, Configuration
from benchmarks.engine.paired import ratio_of, verdict_of
from benchmarks.engine.session import Pass, Session

__all__ = ["Sample", "measure", "ran", "row_of", "sampled", "sweeps"]


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
    """(sweep, configuration): sweep 0 warms up; every second one goes in reverse."""
    for sweep in range(repeat + 1):
        for one in configurations if sweep % 2 else configurations[::-1]:
            yield sweep, one


def measure(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """A row a batch."""
    cases = cases_of(options.grid or GRID)
    if options.batches:
        cases += ragged_cases(options.batches.read_text().splitlines())
    for case in cases:
        if session.late:
            yield {"case": case.name, "skipped": "out of time"}
        elif case.tokens + sum(case.new) * 2 > session.capacity:
            yield {"case": case.name, "skipped": f"the KV pool holds {session.capacity} tokens"}
        else:
            row = _case(
                session, case, session.named(options.prefill_configurations), options.repeat
            )
            print(_line(row), file=sys.stderr, flush=True)
            yield row


def _case(
    session: Session, case: Case, configurations: Sequence[Configuration], repeat: int
) -> dict[str, Any]:
    session.flush()
    heads = [session.tokens(length) for length in case.prefix]
    session.use(session.default)
    if any(heads):
        session.ask([head + session.tokens(1) for head in heads if head])
    asked: dict[int, tuple[str, int, float]] = {}
    cached = 0
    for sweep, configuration in sweeps(configurations, repeat):
        session.use(configuration)
        tag = session.tag(memory=True)
        tails = [session.tokens(length) for length in case.new]
        wall_ms, found = session.ask([h + t for h, t in zip(heads, tails, strict=True)])
        cached = sum(one["meta_info"].get("cached_tokens", 0) for one in found)
        if sweep:
            asked[tag] = (configuration.name, sweep, wall_ms)
    samples = sampled(session.collect(), asked)
    row = {"case": case.name, "prefix": list(case.prefix), "new": list(case.new)}
    return row | {"cached": cached, "as_asked": cached == sum(case.prefix)} | row_of(samples)


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
    wall = ratio_of(wall_ms, {i: one.wall_ms for i, one in default.items()})
    return {
        "gpu_ms": round(median(one.gpu_ms for one in samples), 4),
        "gpu_min_ms": round(min(one.gpu_ms for one in samples), 4),
        "wall_ms": round(median(one.wall_ms for one in samples), 4),
        "host_ms": round(median(one.host_ms for one in samples), 4),
        "samples": len(samples), "ran": sorted({one.ran for one in samples}),
        "peak_mib": max((o.peak_mib for o in samples if o.peak_mib is not None), default=None),
        "gpu_ratio": gpu, "wall_ratio": wall, "verdict": verdict_of(gpu),
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
