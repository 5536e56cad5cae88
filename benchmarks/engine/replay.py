"""Traces replayed against the engine: time to first token, tokens a second, seconds."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.engine.configurations import Configuration
from benchmarks.engine.paired import spread_of
from benchmarks.engine.prefill import ran
from benchmarks.engine.session import Pass, Session, sampling_of
from benchmarks.engine.traces import Prompts, Request, read_trace

__all__ = ["chains_of", "measure", "replayed", "summary_of"]

Asked = tuple[list[int], int]
"""A prompt's token ids, and how many tokens to generate."""


def measure(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """A row a trace."""
    for given in options.trace:
        if session.late:
            yield {"trace": Path(str(given).partition("=")[0]).stem, "skipped": "out of time"}
        else:
            yield _Replays(session, options, str(given)).row()


class _Replays:
    """All replays of one trace."""

    def __init__(self, session: Session, options: argparse.Namespace, given: str) -> None:
        name, names, share, rounds = (*given.split("="), "", "", "")[:4]
        repeats = float(share) if share else None
        session.select(repeats)
        self._session = session
        self._path = path = Path(name)
        self._concurrency = options.concurrency
        self._rounds = int(rounds or options.rounds)
        self._requests = read_trace(
            path, most=options.requests, longest=options.longest, out_tokens=options.out_tokens
        )
        self._prompts = Prompts(self._requests, partial(session.tokens, repeats=repeats))
        self._configurations = session.named(names)
        self._warm = [one for one in self._requests if one.warm]
        self._count = 0

    def row(self) -> dict[str, Any]:
        timed = [one for one in self._requests if not one.warm]
        row: dict[str, Any] = {
            "trace": self._path.stem, "requests": len(timed), "concurrency": self._concurrency,
            "prompt_tokens": sum(one.input_length for one in timed),
            "output_tokens": sum(one.output_length for one in timed),
            "warm_tokens": sum(one.input_length for one in self._warm),
        }  # fmt: skip
        self._session.flush()
        for one in self._warm:
            self._session.ask([self._prompts.of(one, 0)])
        # Compiles what is still to be compiled; in the configuration that goes first next.
        self._replay(self._configurations[0], timed, 0)
        runs: list[dict[str, Any]] = []
        for i in range(1, self._rounds + 1):
            for chosen in self._configurations if i % 2 else self._configurations[::-1]:
                if self._session.late:
                    return row | {"late": True} | summary_of(runs)
                run = self._replay(chosen, timed, i) | {"round": i, "configuration": chosen.name}
                print(self._path.stem, run, file=sys.stderr, flush=True)
                runs.append(run)
        return row | summary_of(runs)

    def _replay(
        self, configuration: Configuration, requests: Sequence[Request], round_number: int
    ) -> dict[str, Any]:
        session = self._session
        self._count += 1
        if self._warm:
            # What was warmed stays; everything else gets tokens that no cache holds.
            prompts = [self._prompts.of(one, self._count) for one in requests]
        else:
            session.flush()
            prompts = [self._prompts.of(one, round_number) for one in requests]
        asked = list(zip(prompts, (one.output_length for one in requests), strict=True))
        session.use(configuration)
        session.memory()
        tag = session.tag()
        begin = time.perf_counter()
        first = session.wait_for(
            replayed(session.engine, chains_of(requests, asked), self._concurrency)
        )
        seconds = time.perf_counter() - begin
        passes = [one for one in session.collect() if one["tag"] == tag]
        peak_mib = session.memory()["peak_mib"]
        return _figures(passes, first, seconds, asked) | {"peak_mib": peak_mib}


def chains_of(requests: Sequence[Request], asked: Sequence[Asked]) -> list[list[Asked]]:
    """What is asked, in chains: a session's requests follow each other, others stand alone."""
    chains: dict[object, list[Asked]] = {}
    for i, (request, one) in enumerate(zip(requests, asked, strict=True)):
        chains.setdefault(request.session or i, []).append(one)
    return list(chains.values())


async def replayed(engine: Any, chains: Sequence[Sequence[Asked]], concurrency: int) -> list[float]:
    """The times to first token in milliseconds; at most `concurrency` requests at a time."""
    gate = asyncio.Semaphore(concurrency)
    first_ms: list[float] = []

    async def one(chain: Sequence[Asked]) -> None:
        for prompt, new in chain:
            async with gate:
                first_ms.append(await _streamed(engine, prompt, new))

    await asyncio.gather(*(one(chain) for chain in chains))
    return first_ms


async def _streamed(engine: Any, prompt: list[int], new: int) -> float:
    begin, first_ms = time.perf_counter(), 0.0
    answers = await engine.async_generate(
        input_ids=prompt, sampling_params=sampling_of(new), stream=True
    )
    async for _ in answers:
        first_ms = first_ms or (time.perf_counter() - begin) * 1e3
    return first_ms


def _figures(
    passes: Sequence[Pass], first_ms: Sequence[float], seconds: float, asked: Sequence[Asked]
) -> dict[str, Any]:
    extend = [one for one in passes if one["mode"] == "EXTEND" and not one["draft"]]
    steps = [one for one in passes if one["mode"] in ("DECODE", "TARGET_VERIFY")]
    prompt, output = sum(len(ids) for ids, _ in asked), sum(new for _, new in asked)
    return {
        "seconds": round(seconds, 4), "ttft_ms": spread_of(first_ms),
        "tokens_per_s": round((prompt + output) / seconds, 1),
        "prefill_gpu_ms": round(sum(one["gpu_ms"] for one in extend), 2),
        "prefill_passes": len(extend), "prefill_tokens": sum(one["q"] for one in extend),
        "decode_gpu_ms": round(sum(one["gpu_ms"] for one in steps), 2),
        "ran": dict(Counter(ran(one) for one in extend)),
    }  # fmt: skip


def summary_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of each configuration."""
    names = list(dict.fromkeys(run["configuration"] for run in runs))
    found = {}
    for name in names:
        mine = [run for run in runs if run["configuration"] == name]
        found[name] = {
            "seconds": round(median(run["seconds"] for run in mine), 4),
            "ttft_ms": {
                what: round(fmean(run["ttft_ms"][what] for run in mine), 3)
                for what in ("median", "mean", "p90")
            },
            "tokens_per_s": round(median(run["tokens_per_s"] for run in mine), 1),
            "prefill_gpu_ms": round(median(run["prefill_gpu_ms"] for run in mine), 2),
            "peak_mib": max(run["peak_mib"] for run in mine), "rounds": len(mine),
            "sweeps": {
                "seconds": {run["round"]: run["seconds"] for run in mine},
                "ttft_ms": {run["round"]: run["ttft_ms"]["mean"] for run in mine},
            },
        }  # fmt: skip
    return {"configurations": found, "runs": list(runs)}
