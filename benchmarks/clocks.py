"""Two clocks: arms in turns share one, and an arm that runs alone sets its own (docs/method.md).

    python -m benchmarks.clocks --heads 16 --kv-dtype bf16
        [--batches "extend:0+2567 extend:8192+1024"] [--arms mla/flashmla_sparse,mla/fa3]

For each batch, after a rest as long as a sweep takes between two batches: each arm's time in the
race; behind itself, once it has run alone for 75 ms; and a layer of whole passes that take turns
(`benchmarks.passes`). Needs a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

from benchmarks.passes import GraphPasses
from nsa_tune import Batch, Dispatcher
from nsa_tune.autotune.bench import devices
from nsa_tune.autotune.bench.timing import interleave, timer_for
from nsa_tune.backend.points import POINTS

_REST_S = 0.4
_SETTLING_S = 0.075
"""Seconds after which the clock of an H200 at its power cap has settled."""
_PASSES = 8


def _sampled_for(seconds: float, sample: Callable[[], float]) -> list[float]:
    end, samples = time.monotonic() + seconds, [sample()]
    while time.monotonic() < end:
        samples.append(sample())
    return samples


def alone_us(sample: Callable[[], float]) -> float:
    """The median time of an arm that ran alone just before."""
    _sampled_for(_SETTLING_S, sample)
    return median(_sampled_for(_SETTLING_S / 2, sample))


def main() -> None:
    """Print a line for each batch and arm."""
    parser = argparse.ArgumentParser(description="Times of arms in turns and of arms alone.")
    parser.add_argument("--model", default="deepseek-v3.2")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--point", default="prefill")
    parser.add_argument("--arms", default="mla/flashmla_sparse,mla/fa3", help="comma-separated")
    parser.add_argument(
        "--batches",
        default="extend:8192+128 extend:8192+512 extend:0+2567 extend:8192+2048 extend:0+8192",
        help="separated by spaces",
    )
    arguments = parser.parse_args()
    device = devices.pick_device("cuda")
    point = POINTS[arguments.point]
    setting = Dispatcher.open(
        model=arguments.model, heads=arguments.heads, kv_dtype=arguments.kv_dtype
    ).setting
    timer, passes = timer_for(device), GraphPasses(device, setting.sharing)
    arms = [point.arm(name) for name in arguments.arms.split(",")]
    print(f"{setting.device.name}; us of a layer")
    for word in arguments.batches.split():
        case = point.case(Batch.parse(word), setting, device)
        runs = [arm.build(case) for arm in arms]
        for run in runs:
            timer.first(run)
        samplers = [timer.sampler(run) for run in runs]
        time.sleep(_REST_S)
        raced = interleave(samplers, timer)
        # A GPU that has rested may draw more for a while.
        _sampled_for(2 * _SETTLING_S, samplers[-1])
        alone = [alone_us(sample) for sample in samplers]
        whole = [passes.captured(arm, case) for arm in arms]
        taken = [[once() / passes.layers for once in whole] for _ in range(_PASSES)]
        for i, arm in enumerate(arms):
            print(
                f"{word} {arm.name}: {raced[i].median_us:.1f} in the race, {alone[i]:.1f} alone, "
                f"{median(one[i] for one in taken):.1f} in passes that take turns",
                flush=True,
            )


if __name__ == "__main__":
    main()
