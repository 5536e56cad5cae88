"""Whole passes of attention, really run: every layer of a model back to back, under each choice.

    python -m benchmarks.passes --heads 128,16 --kv-dtype fp8,bf16 [--batches 60] [--seed 61]
        [--budget 240] [--points prefill,decode] [--sparse-only] [--share 0.3] [--db TABLE]
        [--out FILE]

For random batches each arm that could be the best runs a pass as one CUDA graph of all layers:
the first computes what the pass shares, the others reuse it, and the L2 is flushed before each.
Arms take turns. The regret of the plan's choice is its pass over the best arm's, minus one. Arms
that the table expects to take more than twice the best one's time are not run. --sparse-only leaves
dense attention out, whose kernels FlashInfer compiles for a minute or two at first. --budget ends
everything in time: every setting gets an equal part of what is left.

Layers follow one another at once. In an engine other work runs between them, and a GPU at its power
cap clocks up meanwhile, which can turn a comparison round (docs/method.md). With --share memory is
written between layers, so that the arm expected to be the best takes that part of a pass; this time
is subtracted as that of the flushes is.

On a CPU (--device cpu) the layers run one behind the other without a graph.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, Protocol

import torch

from nsa_tune import Batch, Dispatcher
from nsa_tune.autotune.bench import devices
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.point import Arm, Point, Question

Run = Callable[[], torch.Tensor]

_SEED = 61
_MOST_ROWS = 8192
_SLOWER = 2.0
"""Arms whose estimate is this many times the best one's are not run."""
_TRIES = 40
"""Random batches drawn for each that is run."""
_WARM_UP = 60
"""Replays of the flushes before they are timed."""
_MOST_RESERVED = 0.4
"""Share of the memory that torch may hold before it is freed."""
_FEWEST, _MOST = 3, 11
"""Rounds in which every arm runs a pass."""
_ENOUGH_S = 0.12
"""A batch takes no further round once its passes have taken this long."""


class Passes(Protocol):
    """Times whole passes on one device."""

    layers: int

    flush_us: float
    """Of the flush before a layer."""

    def captured(self, arm: Arm, case: Any, flushes: int = 1) -> Callable[[], float]:
        """A call that runs a pass by `arm`, with so many flushes before each layer, and gives the
        microseconds of its layers; warm."""
        ...

    def release(self) -> None:
        """Called between batches, when none of their calls is held any more."""
        ...


def _layers_of(arm: Arm, case: Any, layers: int) -> list[Run]:
    layer = arm.build(case)
    first = layer if arm.first is None else arm.first(case)
    return [first, *[layer] * (layers - 1)]


class GraphPasses:
    """On a GPU: a pass is one graph, replayed."""

    def __init__(self, device: torch.device, layers: int) -> None:
        self.layers = layers
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * l2, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        flushes = self._graph([lambda: self._flush] * layers)
        # The first ones find a GPU that has clocked down.
        self.flush_us = median([flushes() for _ in range(_WARM_UP)][-9:]) / layers
        del flushes
        self.release()

    def captured(self, arm: Arm, case: Any, flushes: int = 1) -> Callable[[], float]:
        """The time of the flushes alone is subtracted."""
        replay = self._graph(_layers_of(arm, case, self.layers), flushes)
        flushes_us = self.flush_us * self.layers * flushes
        return lambda: replay() - flushes_us

    def _graph(self, runs: Sequence[Run], flushes: int = 1) -> Callable[[], float]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The case's tensors were made on another stream, and kernels compile at their first call.
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            for run in (runs[0], runs[-1]):
                run()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool)
            try:
                for run in runs:
                    for _ in range(flushes):
                        self._flush.zero_()
                    run()
            finally:
                graph.capture_end()

        # A graph holds addresses only: `_keep` keeps alive the tensors that `runs` refer to.
        def replay(_keep: Sequence[Run] = runs) -> float:
            with torch.cuda.stream(self._stream):
                start.record()
                graph.replay()
                stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) * 1e3

        replay()
        return replay

    def release(self) -> None:
        """Free what the graphs held, once it is much: that takes longer than a short pass."""
        # PyTorch refuses a pool whose graphs are all gone.
        self._pool = torch.cuda.graph_pool_handle()
        total = torch.cuda.get_device_properties(self._device).total_memory
        if torch.cuda.memory_reserved(self._device) > _MOST_RESERVED * total:
            torch.cuda.empty_cache()


class LoopPasses:
    """On a CPU: the layers one behind the other."""

    flush_us = 0.0

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def captured(self, arm: Arm, case: Any, flushes: int = 1) -> Callable[[], float]:
        """Timed by the clock; nothing is flushed."""
        runs = _layers_of(arm, case, self.layers)
        runs[0](), runs[-1]()

        def once() -> float:
            start = time.perf_counter()
            for run in runs:
                run()
            return (time.perf_counter() - start) * 1e6

        return once

    def release(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True, slots=True)
class Row:
    """One batch."""

    point: str
    heads: int
    kv_layout: str
    batch: str
    chosen: str
    """The arm of the plan."""
    pass_us: Mapping[str, float]
    """By arm: the median over the rounds."""
    regret: float
    failed: Mapping[str, str]
    """Arms that could not be run, and why."""


def rows(
    point: Point, dispatcher: Dispatcher, passes: Passes, device: torch.device, batches: int,
    end: float, sparse_only: bool = False, seed: int = _SEED, share: float = 1.0,
) -> Iterator[Row]:  # fmt: skip
    """A row for each of `batches` random batches that leave a choice, until the clock's `end`."""
    setting, random = dispatcher.setting, Random(seed)
    left = batches
    for _ in range(_TRIES * batches):
        if not left or time.monotonic() > end:
            return
        batch = point.sample(setting, random)
        if batch.q_tokens > _MOST_ROWS:
            continue
        chosen, arms = contenders(point, dispatcher, batch, sparse_only)
        if chosen is None or len(arms) < 2:
            continue
        left -= 1
        times, failed = timed(point, batch, arms, dispatcher, passes, device, share)
        if chosen not in times or len(times) < 2:
            print(f"{batch}: not run: {failed}", file=sys.stderr)
            continue
        regret = times[chosen] / min(times.values()) - 1
        yield Row(
            point.name, setting.heads, str(setting.layout), str(batch), chosen, times, regret,
            failed,
        )  # fmt: skip


def contenders(
    point: Point, dispatcher: Dispatcher, batch: Batch, sparse_only: bool = False
) -> tuple[str | None, list[Arm]]:
    """The arm that the plan takes, and the arms that could be the best; the plan's among them."""
    policy, plan = dispatcher.policies[point.name], dispatcher.plan(batch)
    known = {arm: us for arm, us in policy.survey(batch).latencies.items() if us is not None}
    if sparse_only:
        known = {arm: us for arm, us in known.items() if not arm.startswith("mha/")}

    def choice(question: Question) -> str | None:
        if sparse_only and "mla" in question.choices:
            return "mla"
        taken: str | None = getattr(plan, question.name)
        return taken

    taken = {arm: us for arm, us in known.items() if arm in point.arms_taken(choice)}
    if not taken:
        return None, []
    chosen, best = min(taken, key=taken.__getitem__), min(known.values())
    wanted = [arm for arm, us in known.items() if us <= _SLOWER * best or arm == chosen]
    return chosen, [point.arm(name) for name in wanted]


def timed(
    point: Point, batch: Batch, arms: Sequence[Arm], dispatcher: Dispatcher, passes: Passes,
    device: torch.device, share: float = 1.0,
) -> tuple[dict[str, float], dict[str, str]]:  # fmt: skip
    """By arm the median time of a pass, and why an arm could not be run."""
    case = point.case(batch, dispatcher.setting, device)
    known = dispatcher.policies[point.name].survey(batch).latencies
    best_us = min(us for arm in arms if (us := known[arm.name]) is not None)
    flushes = flushes_for(share, best_us, passes.flush_us)
    ready: dict[str, Callable[[], float]] = {}
    failed: dict[str, str] = {}
    for arm in arms:
        try:
            ready[arm.name] = passes.captured(arm, case, flushes)
        except Exception as failure:  # noqa: BLE001 - a kernel library may raise anything
            failed[arm.name] = str(failure).splitlines()[0][:200] if str(failure) else "failed"
    samples: dict[str, list[float]] = {name: [] for name in ready}
    start = time.monotonic()
    for number in range(_MOST):
        order = list(ready.items())
        for name, once in order if number % 2 else reversed(order):
            samples[name].append(once())
        if number + 1 >= _FEWEST and time.monotonic() - start > _ENOUGH_S:
            break
    ready.clear()
    del case
    passes.release()
    return {name: median(some) for name, some in samples.items()}, failed


def flushes_for(share: float, layer_us: float, flush_us: float) -> int:
    """How many flushes leave a layer `share` of the time; 1 at least."""
    if share >= 1 or not flush_us:
        return 1
    return max(round(layer_us * (1 / share - 1) / flush_us), 1)


def summary(found: Sequence[Row]) -> str:
    """One line for one point of one setting."""
    if not found:
        return "no batch was run"
    regrets = sorted(row.regret for row in found)
    worst = max(found, key=lambda row: row.regret)
    over = sum(one > 0.1 for one in regrets)
    best = min(worst.pass_us, key=worst.pass_us.__getitem__)
    return (
        f"{worst.point}, {worst.heads} heads, {worst.kv_layout}: {len(found)} batches, regret of a "
        f"pass {fmean(regrets):.2%} on the mean, {regrets[-1]:.1%} at worst, {over} above 10 % "
        f"(worst: {worst.batch[:60]}, {worst.chosen} {worst.pass_us[worst.chosen]:.0f} us, "
        f"{best} {worst.pass_us[best]:.0f} us)"
    )


def _run(
    arguments: argparse.Namespace, device: torch.device, heads: int, kv_dtype: str,
    part: Callable[[], float],
) -> None:  # fmt: skip
    open_ = partial(Dispatcher.open, arguments.db, layers=arguments.layers)
    dispatcher = open_(model=arguments.model, heads=heads, kv_dtype=kv_dtype)
    print(f"{dispatcher.setting.device.name}, {dispatcher.source}", file=sys.stderr)
    layers = dispatcher.setting.sharing
    passes: Passes = GraphPasses(device, layers) if device.type == "cuda" else LoopPasses(layers)
    for name in arguments.points.split(","):
        end = time.monotonic() + part()
        found: list[Row] = []
        drawn = rows(
            POINTS[name], dispatcher, passes, device, arguments.batches, end,
            arguments.sparse_only, arguments.seed, arguments.share,
        )  # fmt: skip
        for row in drawn:
            found.append(row)
            if arguments.out is not None:
                with arguments.out.open("a") as out:
                    out.write(json.dumps(asdict(row)) + "\n")
        print(f"{summary(found) if found else f'{name}: no batch was run'}", flush=True)


def main() -> None:
    """Run and print one line a point and setting; the rows go to --out as JSON lines."""
    parser = argparse.ArgumentParser(description="Passes of attention under each choice.")
    parser.add_argument("--model", default="deepseek-v3.2")
    parser.add_argument("--heads", default="128", help="comma-separated")
    parser.add_argument("--kv-dtype", default="fp8", help="comma-separated")
    parser.add_argument("--points", default="prefill,decode", help="comma-separated")
    parser.add_argument("--batches", type=int, default=60, help="of each point and setting")
    parser.add_argument("--seed", type=int, default=_SEED, help="of the random batches")
    parser.add_argument("--budget", type=float, default=inf, help="seconds for all together")
    parser.add_argument("--sparse-only", action="store_true", help="without dense attention")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of a pass that attention takes; on a GPU only"
    )
    parser.add_argument("--layers", type=int, help="default: the whole model's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--db", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not 0 < arguments.share <= 1:
        parser.error(f"--share {arguments.share:g}: give a number above 0, up to 1")
    device = devices.pick_device(arguments.device)
    end = time.monotonic() + arguments.budget
    settings = [
        (int(heads), kv_dtype)
        for kv_dtype in arguments.kv_dtype.split(",")
        for heads in arguments.heads.split(",")
    ]
    parts = len(settings) * len(arguments.points.split(","))
    done = iter(range(parts))

    def part() -> float:
        return float(end - time.monotonic()) / (parts - next(done))

    for heads, kv_dtype in settings:
        _run(arguments, device, heads, kv_dtype, part)


if __name__ == "__main__":
    main()
