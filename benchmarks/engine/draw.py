"""Draw random prefill batches of real traffic, as a scheduler makes them of request traces.

    python -m benchmarks.engine.draw TRACE ... --out batches.jsonl [--batches 20] [--seed 1]
    python -m benchmarks.engine.run --grid , --batches batches.jsonl ...

Each trace is played through the simulated scheduler that `nsa-tune replay` uses, and gives as many
batches, each pass with equal chance: frequent kinds come often, sums and raggedness are the
trace's. A line is {"prefix": [...], "new": [...]}, tokens of each sequence; a prefix is cut to the
whole pages that the radix cache keeps. Small batches come first, or with `--shuffle` any, so that a
run that ends early has measured the same mix.

The traces are those that `nsa-tune replay` reads, or `benchmarks.engine.synthesise` writes. The
latter have no times: `--rate` requests arrive in a second, at random, once their caches are filled.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from benchmarks.engine.cases import PAGE, Case
from benchmarks.engine.traces import Request, read_trace
from nsa_tune.autotune.workload.requests import BLOCK, TraceRequest, read_requests
from nsa_tune.autotune.workload.simulation import SchedulerConfig, passes

_FILLED_S = 1000.0
"""When caches are filled, and requests without times begin to arrive."""


def prefills(
    trace: Path, scheduler: SchedulerConfig, requests: int, most_tokens: int, rate: float
) -> list[Case]:
    """The different prefill passes of the first `requests` of `trace`, in order.

    Those of more than `most_tokens`, cached and new, are left out.
    """
    with trace.open(encoding="utf-8") as file:
        timed = '"segments"' not in file.readline()
    asked = read_requests(trace)[:requests] if timed else arriving(trace, requests, rate)
    begin_s = 0.0 if timed else _FILLED_S
    played = (step for step in passes(asked, scheduler) if step.start_s >= begin_s)
    batches = (case_of(step.lens) for step in played if step.is_extend)
    return [*dict.fromkeys(batch for batch in batches if batch.tokens <= most_tokens)]


def arriving(trace: Path, requests: int, rate: float) -> list[TraceRequest]:
    """The requests of a trace without times, `rate` a second; warm ones arrive at the beginning."""
    random, now = Random(1), _FILLED_S
    found = []
    for one in read_trace(trace, most=requests, longest=2**24, out_tokens=2**20):
        now += 0.0 if one.warm else random.expovariate(rate)
        arrival_s = 0.0 if one.warm else now
        found.append(TraceRequest(arrival_s, one.input_length, one.output_length, blocks_of(one)))
    return found


def blocks_of(request: Request) -> tuple[tuple[object, ...], ...]:
    """Names of a prompt's whole blocks: equal where all tokens up to a block's end are."""
    tokens = [(part.name, i) for part in request.segments for i in range(part.tokens)]
    count = len(tokens) // BLOCK
    return tuple((i, tokens[i * BLOCK], tokens[(i + 1) * BLOCK - 1]) for i in range(count))


def case_of(lengths: Sequence[tuple[int, int]]) -> Case:
    """The batch of (prefix, new) pairs, prefixes cut to whole pages."""
    prefixes, news = zip(*lengths, strict=True)
    return Case(tuple(prefix // PAGE * PAGE for prefix in prefixes), tuple(news))


def drawn(traces: list[list[Case]], count: int, seed: int) -> list[Case]:
    """`count` different batches, the same number of each trace where it has so many."""
    random = Random(seed)
    shuffled = [random.sample(batches, len(batches)) for batches in traces]
    chosen: dict[Case, None] = {}
    while len(chosen) < count and any(shuffled):
        for batches in shuffled:
            if batches and len(chosen) < count:
                chosen[batches.pop()] = None
    return sorted(chosen, key=lambda case: (case.tokens, case.prefix, case.new))


def main(arguments: list[str] | None = None) -> int:
    """Write the batches; 0 when there were as many as asked for."""
    parser = argparse.ArgumentParser(description="Draw prefill batches of request traces.")
    parser.add_argument("traces", type=Path, nargs="+", help="as above")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--requests", type=int, default=2000, help="the first so many of each trace"
    )
    parser.add_argument("--chunk", type=int, default=8192, help="new tokens of a pass at most")
    parser.add_argument(
        "--most-tokens", type=int, default=120_000, help="cached and new, of a pass"
    )
    parser.add_argument("--rate", type=float, default=20, help="requests a second without times")
    parser.add_argument("--shuffle", action="store_true")
    options = parser.parse_args(arguments)
    scheduler = SchedulerConfig(chunk_tokens=options.chunk, next_n=1)
    played = [
        prefills(trace, scheduler, options.requests, options.most_tokens, options.rate)
        for trace in options.traces
    ]
    batches = drawn(played, options.batches, options.seed)
    if options.shuffle:
        Random(options.seed).shuffle(batches)
    lines = [json.dumps({"prefix": case.prefix, "new": case.new}) for case in batches]
    options.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    passes_found = sum(map(len, played))
    print(
        f"{len(batches)} of {passes_found} different passes, seed {options.seed}", file=sys.stderr
    )
    return 0 if len(batches) == options.batches else 1


if __name__ == "__main__":
    sys.exit(main())
