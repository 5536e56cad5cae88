"""Whether all ranks of an engine on several GPUs do the same, pass by pass, under mixed load.

A rank that replays a graph while another runs eagerly waits for it for ever. So the passes of all
ranks are laid side by side: as many passes, in the same order, each as a graph on all or on none,
and each in the way that the plug-in chose on all. Without data-parallel attention, what each pass
ran must be the same too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random
from typing import Any

from benchmarks.engine.cases import PAGE
from benchmarks.engine.prefill import ran
from benchmarks.engine.session import Pass, Session, sampling_of, way
from benchmarks.engine.soak import TableEvents

__all__ = ["Request", "differences", "measure", "summary_of", "waves"]

_CHANGE_EVERY, _EVENT_EVERY, _COLLECT_EVERY = 4, 3, 20
"""In waves."""
_MOST_SHOWN = 10
_SHORTEST, _LONGEST = 8, 3000
_HEADS, _LONGEST_HEAD = 8, 40
"""Shared prefixes, and the most pages of one."""
_AFTER_S = (0.0, 0.0, 0.01, 0.03)


def measure(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """One row: passes a rank, and where ranks differ. RuntimeError behind it when they differ,
    or an answer was too short."""
    events = TableEvents(options.soak_table) if options.soak_table else None
    try:
        row = _mixed(session, options, events)
    finally:
        if events is not None:
            events.restore()
    print("ranks", row, file=sys.stderr, flush=True)
    yield row
    if row["differences"] or row["wrong_answers"]:
        raise RuntimeError(
            f"ranks differ in {row['differences']} passes, "
            f"{row['wrong_answers']} answers have another length than was asked for"
        )


def _mixed(
    session: Session, options: argparse.Namespace, events: TableEvents | None
) -> dict[str, Any]:
    """Mixed load until there are enough passes, changing configurations and tables."""
    session.flush()
    passes: list[Pass] = []
    happened: list[str] = []
    asked, wrong, begin = 0, 0, time.monotonic()
    for i, wave in enumerate(waves(session)):
        if i % _CHANGE_EVERY == 0:
            session.use(session.configurations[i // _CHANGE_EVERY % len(session.configurations)])
        if events is not None and i % _EVENT_EVERY == 0:
            happened.append(events.next())
        session.tag()
        lengths = session.wait_for(_answered(session.engine, wave))
        asked += len(wave)
        wrong += sum(given != one.new for given, one in zip(lengths, wave, strict=True))
        if i % _COLLECT_EVERY == _COLLECT_EVERY - 1:
            passes += session.collect(all_ranks=True)
            if session.late or len(passes) >= options.rank_passes * options.real_tp:
                break
    by_rank: dict[int, list[Pass]] = {}
    for one in passes:
        by_rank.setdefault(one["gpu"], []).append(one)
    found = list(differences(by_rank, alike=options.real_dp == 1))
    return {
        "seconds": round(time.monotonic() - begin, 1), "requests": asked, "wrong_answers": wrong,
        "table_events": {name: happened.count(name) for name in sorted(set(happened))},
        "by_rank": {str(rank): summary_of(mine) for rank, mine in sorted(by_rank.items())},
        "differences": len(found), "shown": found[:_MOST_SHOWN],
    }  # fmt: skip


def summary_of(passes: Sequence[Pass]) -> dict[str, Any]:
    """How many passes of one rank ran how."""
    prefills = [one for one in passes if one["mode"] == "EXTEND"]
    return {
        "passes": len(passes), "modes": dict(Counter(one["mode"] for one in passes)),
        "ways": dict(Counter(way(one) for one in passes)),
        "prefills": {
            "graph": sum(one["graph"] for one in prefills),
            "eager": sum(not one["graph"] for one in prefills),
            "mha": sum(one["mha"] for one in prefills),
        },
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a wave."""

    prompt: list[int]
    new: int
    """Tokens to generate."""
    after_s: float
    """When it is sent, from the wave's start."""


def waves(session: Session) -> Iterator[list[Request]]:
    """Requests that overlap: while some decode, others are prefilled.

    Prompts end on both sides of index_topk and of the largest prefill graph; half of them share one
    of a few prefixes.
    """
    random = Random(13)
    heads = [session.tokens(PAGE * random.randrange(1, _LONGEST_HEAD)) for _ in range(_HEADS)]
    while True:
        wave = []
        for _ in range(random.choice((1, 2, 4, 8))):
            length = int(exp(random.uniform(log(_SHORTEST), log(_LONGEST))))
            head = random.choice(heads) if random.random() < 0.5 else []
            prompt = head + session.tokens(length)
            wave.append(Request(prompt, random.choice((1, 1, 2, 4)), random.choice(_AFTER_S)))
        yield wave


async def _answered(engine: Any, wave: Sequence[Request]) -> list[int]:
    """How many tokens each request of a wave got."""

    async def one(request: Request) -> int:
        await asyncio.sleep(request.after_s)
        found = await engine.async_generate(
            input_ids=request.prompt, sampling_params=sampling_of(request.new)
        )
        return len(found["output_ids"])

    return list(await asyncio.gather(*map(one, wave)))


def differences(by_rank: Mapping[int, Sequence[Pass]], *, alike: bool) -> Iterator[dict[str, Any]]:
    """Passes that are not the same on all ranks.

    `alike`: also what a pass ran must be the same; data-parallel ranks have batches of their own.
    """
    for i, passes in enumerate(zip(*by_rank.values(), strict=False)):
        kinds = {_kind(one, alike=alike) for one in passes}
        if len(kinds) > 1:
            ranks = dict(zip(map(str, by_rank), passes, strict=True))
            yield {"pass": i, "ranks": ranks}
    lengths = {len(passes) for passes in by_rank.values()}
    if len(lengths) > 1:
        yield {"passes": {str(rank): len(passes) for rank, passes in by_rank.items()}}


def _kind(one: Pass, *, alike: bool) -> tuple[Any, ...]:
    own = (ran(one), one["mode"], one["q"]) if alike and "q" in one else ()
    return (one["graph"], way(one), *own)
