"""Decode and speculative verify: the passes of batches that generate, in each configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.engine.cases import decode_batches_of
from benchmarks.engine.configurations import DEFAULT, Configuration
from benchmarks.engine.prefill import sweeps
from benchmarks.engine.session import Pass, Session

__all__ = ["measure", "steps_of"]

_STEPS = ("DECODE", "TARGET_VERIFY")
_FIRST, _LAST = 3, 1
"""Steps at both ends that do not count: the batch is not complete, or results are awaited."""


def measure(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """A row a batch size."""
    chosen = _configurations(session, options.decode_configurations)
    for count, context in decode_batches_of(options.decode_batches, options.decode_context):
        row = {"sequences": count, "context": context}
        needed = count * (context + 2 * options.decode_tokens + 128)
        if session.late:
            yield row | {"skipped": "out of time"}
        elif needed > session.capacity:
            yield row | {"skipped": f"needs {needed} of {session.capacity} tokens in the KV pool"}
        else:
            row |= _batch(session, chosen, count, context, options)
            print("decode", row, file=sys.stderr, flush=True)
            yield row


def _configurations(session: Session, names: str) -> tuple[Configuration, ...]:
    """Those asked for; else SGLang's own and the plug-in's: prefill's options change no decode."""
    if names:
        return session.named(names)
    return tuple(one for one in session.configurations if one.plugin or one.name == DEFAULT)


def _batch(
    session: Session,
    configurations: Sequence[Configuration],
    count: int,
    context: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    session.flush()
    prompts = [session.tokens(context) for _ in range(count)]
    session.use(configurations[0])
    session.ask(prompts)
    asked: dict[int, tuple[str, int]] = {}
    for sweep, configuration in sweeps(configurations, options.repeat):
        session.use(configuration)
        tag = session.tag()
        session.ask(prompts, options.decode_tokens if sweep else 4)
        if sweep:
            asked[tag] = (configuration.name, sweep)
    return {"configurations": _figures(session.collect(), asked, count)}


def steps_of(passes: Iterable[Pass], tag: int, count: int) -> list[Pass]:
    """The steps of the target model with all `count` sequences, without those at both ends."""
    steps = [
        one
        for one in passes
        if one["tag"] == tag and one["mode"] in _STEPS and one["bs"] == count and not one["draft"]
    ]
    return steps[_FIRST : len(steps) - _LAST]


def _figures(
    passes: Sequence[Pass], asked: Mapping[int, tuple[str, int]], count: int
) -> dict[str, Any]:
    gpu: dict[str, dict[int, float]] = {}
    gap: dict[str, dict[int, float]] = {}
    both, kinds = {"gpu": gpu, "step": gap}, dict[str, dict[str, Any]]()
    for tag, (name, sweep) in asked.items():
        steps = steps_of(passes, tag, count)
        if len(steps) < 2:
            continue
        gpu.setdefault(name, {})[sweep] = median(one["gpu_ms"] for one in steps)
        gap.setdefault(name, {})[sweep] = _gap_ms(steps)
        kinds[name] = {
            "mode": steps[0]["mode"], "graph": all(one["graph"] for one in steps),
            "steps": len(steps),
        }  # fmt: skip
    return {
        name: kinds[name]
        | {f"{what}_ms": round(median(ms[name].values()), 4) for what, ms in both.items()}
        | {"sweeps": {f"{what}_ms": _rounded(ms[name]) for what, ms in both.items()}}
        for name in gpu
    }


def _rounded(sweeps_ms: Mapping[int, float]) -> dict[int, float]:
    return {sweep: round(value, 4) for sweep, value in sweeps_ms.items()}


def _gap_ms(steps: Sequence[Pass]) -> float:
    """Median time from one launch to the next: what a user waits for between tokens."""
    times = [float(one["t"]) for one in steps]
    return median((after - before) * 1e3 for before, after in pairwise(times))
