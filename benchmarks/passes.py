"""Whole passes of attention, really run: every layer of a model back to back, under each choice.

    python benchmarks/passes.py --heads 64 --kv-dtype fp8 [--batches 60] [--db TABLE] [--out FILE]

Needs the GPU. For random batches each arm that may run is captured as one graph of all layers: the
first computes what the pass shares, the others reuse it, and the L2 is flushed before each. The
regret of the plan's choice is its pass over the best arm's, minus one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import torch

from nsa_tune import Batch, Dispatcher
from nsa_tune.autotune.bench import devices
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.point import Arm, Point, Setting

Run = Callable[[], torch.Tensor]

_POINTS = ("prefill", "decode")
_QUESTIONS = {"prefill": "sparse_prefill", "decode": "decode"}
_MOST_ROWS = 8192
_REPEATS = 7


class Passes:
    """Times passes on one GPU."""

    def __init__(self, device: torch.device, layers: int) -> None:
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * l2, dtype=torch.uint8, device=device)
        self._layers = layers
        self._stream = torch.cuda.Stream(device)
        self._flushes_us = self._timed([lambda: self._flush] * layers)

    def microseconds(self, arm: Arm, case: Any) -> float:
        """All layers of a pass by `arm`."""
        layer = arm.build(case)
        first = layer if arm.first is None else arm.first(case)
        return self._timed([first, *[layer] * (self._layers - 1)]) - self._flushes_us

    def _timed(self, runs: list[Run]) -> float:
        """The median of several replays of one graph of `runs`, each behind a flush."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            for run in (runs[0], runs[-1]):
                run()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            for run in runs:
                self._flush.zero_()
                run()
            graph.capture_end()
            found = []
            for _ in range(_REPEATS):
                start.record()
                graph.replay()
                stop.record()
                stop.synchronize()
                found.append(start.elapsed_time(stop) * 1e3)
        return float(median(found))


def rows(
    point: Point, dispatcher: Dispatcher, passes: Passes, device: torch.device, batches: int
) -> Iterator[dict[str, Any]]:
    """One row a batch: what each choice takes, and what the plan takes."""
    setting, random = dispatcher.setting, Random(61)
    question = next(one for one in point.questions if one.name == _QUESTIONS[point.name])
    while batches:
        batch = point.sample(setting, random)
        arms = _arms(point, batch, setting)
        wanted = {arm for arms_ in question.choices.values() for arm in arms_}
        arms = [arm for arm in arms if arm.name in wanted]
        if batch.q_tokens > _MOST_ROWS or len(arms) < 2:
            continue
        batches -= 1
        case = point.case(batch, setting, device)
        times = {arm.name: passes.microseconds(arm, case) for arm in arms}
        chosen = getattr(dispatcher.plan(batch), question.name)
        took = min((times[arm] for arm in question.choices[chosen] if arm in times), default=inf)
        yield {
            "point": point.name,
            "batch": str(batch),
            "chosen": chosen,
            "pass_us": times,
            "regret": took / min(times.values()) - 1,
        }
        del case
        torch.cuda.empty_cache()


def _arms(point: Point, batch: Batch, setting: Setting) -> list[Arm]:
    return [arm for arm in point.candidates(setting) if arm.allowed(batch, setting) is None]


def main() -> None:
    """Run and print one line a point; the rows go to --out as JSON lines."""
    parser = argparse.ArgumentParser(description="Passes of attention under each choice.")
    parser.add_argument("--model", default="deepseek-v3.2")
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--kv-dtype", default="fp8")
    parser.add_argument("--batches", type=int, default=60, help="of each point")
    parser.add_argument("--db", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = devices.pick_device("cuda")
    dispatcher = Dispatcher.open(
        arguments.db, model=arguments.model, heads=arguments.heads, kv_dtype=arguments.kv_dtype
    )
    print(f"{torch.cuda.get_device_name()}, {dispatcher.source}", file=sys.stderr)
    passes = Passes(device, dispatcher.setting.sharing)
    for name in _POINTS:
        found = list(rows(POINTS[name], dispatcher, passes, device, arguments.batches))
        if arguments.out is not None:
            with arguments.out.open("a") as out:
                out.writelines(json.dumps(row) + "\n" for row in found)
        regrets = [row["regret"] for row in found]
        worst = max(found, key=lambda row: float(row["regret"]))
        print(
            f"{name}: {len(found)} batches, regret of a pass {fmean(regrets):.2%} on the mean, "
            f"{max(regrets):.1%} at worst ({worst['batch'][:60]})"
        )


if __name__ == "__main__":
    main()
