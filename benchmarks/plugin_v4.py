"""What the SGLang plug-in adds to a forward pass of DeepSeek V4, beside the engine's own switch.

    python -m benchmarks.plugin_v4 [--db TABLE] [--layers 61] [--json]

Run it in the repository's root. SGLang's method is taken out of its wheel, which is downloaded
once. Every figure is microseconds a pass, in which the switch is asked once before the first layer
and once in each; each round times both variants one after the other, and the medians of the rounds
are shown. "new" batches were never seen before; of "seen" ones lengths were.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.plugin import SEQUENCES, _Modules
from nsa_tune import Dispatcher
from nsa_tune.engines.sglang.v4.prefill import V4Prefill, around_sparse_prefill
from nsa_tune.engines.v4_answers import Layers, V4Answers
from tests.engines.sglang.engine_v4 import V4Engine
from tests.engines.sglang.wheels import VERSIONS, wheel_of

ROUNDS = 7
PASSES = 200
_WINDOW_LAYERS = 1


def _batches(engine: V4Engine, sequences: int, random: Random) -> list[Any]:
    return [
        engine.batch(
            [random.randrange(300_000 // sequences) for _ in range(sequences)],
            [random.randrange(1, 64) for _ in range(sequences)],
        )
        for _ in range(PASSES)
    ]


def _microseconds(backend: Any, batches: Sequence[Any], asked: range) -> float:
    switch = backend._use_sparse_prefill
    start = time.perf_counter()
    for batch in batches:
        for _ in asked:
            switch(batch, num_qo_tokens=64)
    return (time.perf_counter() - start) / len(batches) * 1e6


def measure(engine: V4Engine, dispatcher: Dispatcher, layers: int) -> list[dict[str, float]]:
    """One row a number of sequences."""
    half = layers // 2
    counts = Layers({4: half, 128: layers - half - _WINDOW_LAYERS}, _WINDOW_LAYERS)
    plain = engine.backend()
    hooked = engine.backend(engine.hooked({"_use_sparse_prefill": around_sparse_prefill}))
    answers = V4Answers(dispatcher, counts, most_q=2048)
    V4Prefill.attach(hooked, answers, None)
    asked = range(layers + 1)
    rows = []
    for sequences in SEQUENCES:
        random = Random(sequences)
        times: dict[str, list[float]] = {"engine_us": [], "added_new_us": [], "added_seen_us": []}
        for _ in range(ROUNDS):
            batches = _batches(engine, sequences, random)
            own = _microseconds(plain, batches, asked)
            times["engine_us"].append(own)
            times["added_new_us"].append(_microseconds(hooked, batches, asked) - own)
            times["added_seen_us"].append(_microseconds(hooked, batches, asked) - own)
        rows.append({"sequences": sequences, **{name: median(t) for name, t in times.items()}})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--db", type=Path, help="table; the shipped one otherwise")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    dispatcher = Dispatcher.open(
        arguments.db, "NVIDIA H100 80GB HBM3", model="deepseek-v4", heads=128, kv_dtype="fp8",
        strict=True,
    )  # fmt: skip
    engine = V4Engine.of(wheel_of(VERSIONS[-1]), _Modules())
    found = {
        "schema": "nsa-tune/benchmark-plugin-v4/1",
        "sglang": VERSIONS[-1],
        "python": sys.version.split()[0],
        "layers": arguments.layers,
        "table": dispatcher.source,
        "passes": (rows := measure(engine, dispatcher, arguments.layers)),
    }
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"SGLang {found['sglang']}, Python {found['python']}, {arguments.layers} layers")
    print("sequences   SGLang   added: new  seen   (us a pass)")
    for row in rows:
        print(
            f"{row['sequences']:9d} {row['engine_us']:8.1f} {row['added_new_us']:12.1f} "
            f"{row['added_seen_us']:5.1f}"
        )


if __name__ == "__main__":
    main()
