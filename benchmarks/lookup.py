"""What decisions cost in the engine's process: plans, the first plan, opening a table, memory.

    python benchmarks/lookup.py [--table STEM] [--plans 1000000]

Each batch is drawn at random and new to the dispatcher, which keeps no plans. A figure is the
median over the batches of the best of several rounds, because a shared machine makes single rounds
slow. Opening is CPU time of a new process, without its imports. `--plans` makes so many plans and
says by how much the process grew meanwhile.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter_ns, process_time
from typing import Any, NamedTuple

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.points import POINTS
from nsa_tune.db.places import shipped
from nsa_tune.db.text_table import read_text

_TABLE = "h200_deepseek-v3.2_h16_fp8"
_BATCHES, _CALLS, _ROUNDS = 100, 10, 20
_STARTS = 5
_KINDS = (("prefill", "prefill"), ("indexer_layout", "verify"))


class Figure(NamedTuple):
    """One line of the result."""

    what: str
    value: float
    unit: str
    limit: float | None
    """What it is meant to stay under."""


def best_us(function: Callable[[Any], object], arguments: Sequence[Any]) -> float:
    """Microseconds of a call: the best round for each argument, the median over the arguments.

    A round goes over all arguments, so that a slow moment does not fall into all rounds of one.
    """
    best = [inf] * len(arguments)
    for _ in range(_ROUNDS):
        for i, argument in enumerate(arguments):
            start = perf_counter_ns()
            for _ in range(_CALLS):
                function(argument)
            best[i] = min(best[i], (perf_counter_ns() - start) / _CALLS)
    return median(best) / 1e3


def opened(path: Path) -> Dispatcher:
    """The dispatcher of a shipped table."""
    key = read_text(path).key
    kv_dtype = "bf16" if key.kv_layout == "bf16" else "fp8"
    return Dispatcher.open(path, key.gpu, model=key.model, heads=key.heads, kv_dtype=kv_dtype)


def drawn(dispatcher: Dispatcher, point: str, sequences: int | None = None) -> list[Batch]:
    """Random batches; with `sequences`, extends of so many."""
    random = Random(17)
    if sequences is None:
        return [POINTS[point].sample(dispatcher.setting, random) for _ in range(_BATCHES)]
    return [
        Batch.extend(
            [random.randrange(8192) for _ in range(sequences)],
            [random.randrange(1, 512) for _ in range(sequences)],
        )
        for _ in range(_BATCHES)
    ]


def figures(path: Path, plans: int) -> list[Figure]:
    """Every line of the result; the empty call first."""
    dispatcher = opened(path)
    lines = [Figure("an empty call", best_us(lambda _: None, [0] * 50), "us", None)]
    both = dispatcher.choosers(("prefill_path", "sparse_prefill"))
    sums = [batch.sums for batch in drawn(dispatcher, "prefill")]
    what = "prefill_path and sparse_prefill, as plug-ins ask"
    lines.append(Figure(f"{what}, from sums", best_us(both, sums), "us", 15))
    for count, limit in ((8, 30), (64, 30)):
        batches = drawn(dispatcher, "prefill", count)
        lines.append(Figure(f"{what}, {count} lengths", best_us(both, batches), "us", limit))
    for point, name in _KINDS:
        sums = [batch.sums for batch in drawn(dispatcher, point)]
        lines.append(Figure(f"{name} plan from sums", best_us(dispatcher.plan, sums), "us", None))
    starts = [_child(path) for _ in range(_STARTS)]
    lines.append(Figure("opening, CPU", min(one["open_ms"] for one in starts), "ms", 200))
    lines.append(Figure("the first plan", min(one["first_ms"] for one in starts), "ms", 5))
    if plans:
        lines.append(Figure(f"growth over {plans:,} plans", _growth(dispatcher, plans), "MiB", 1))
    return lines


def _child(path: Path) -> dict[str, float]:
    """Opening and the first plan in a new process, as an engine has them."""
    command = [sys.executable, __file__, "--open", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(text))


def _start(path: Path) -> dict[str, float]:
    begin = process_time()
    dispatcher = opened(path)
    opened_ms = (process_time() - begin) * 1e3
    batch = drawn(dispatcher, "prefill")[0].sums
    begin = process_time()
    dispatcher.plan(batch)
    return {"open_ms": opened_ms, "first_ms": (process_time() - begin) * 1e3}


def _growth(dispatcher: Dispatcher, plans: int) -> float:
    """MiB that the process grows by in the last nine tenths of so many plans."""
    random, point = Random(29), POINTS["prefill"]
    batches = [point.sample(dispatcher.setting, random).sums for _ in range(1000)]
    before = 0
    for number in range(plans):
        if number == plans // 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        dispatcher.plan(batches[number % len(batches)])
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Print the figures as a table."""
    parser = argparse.ArgumentParser(description="What decisions cost in the engine's process.")
    parser.add_argument("--table", default=_TABLE, help="the name of a shipped table")
    parser.add_argument("--plans", type=int, default=0, help="plans of the test of memory")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        json.dump(_start(arguments.open), sys.stdout)
        return
    names = {path.stem: path for path in shipped()}
    if arguments.table not in names:
        parser.error(f"there is no shipped table {arguments.table}; there are {', '.join(names)}")
    lines = figures(names[arguments.table], arguments.plans)
    print(f"{arguments.table}; {detect.cpu_name()}, Python {platform.python_version()}")
    print("| what | takes | meant to stay under |")
    print("|---|---|---|")
    for line in lines:
        limit = "" if line.limit is None else f"{line.limit:g} {line.unit}"
        print(f"| {line.what} | {line.value:.3g} {line.unit} | {limit} |")


if __name__ == "__main__":
    main()
