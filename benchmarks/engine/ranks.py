"""Whether all ranks of an engine on several GPUs do the same, pass by pass, under mixed load.

A rank that replays a graph while another runs eagerly waits for it for ever. So the passes of all
ranks are laid side by side: as many passes, in the same order, each as a graph on all or on none.
Without data-parallel attention, what each pass ran must be the same too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.engine.prefill import ran
from benchmarks.engine.session import Pass, Session
from benchmarks.engine.soak import TableEvents, load

__all__ = ["differences", "measure"]

_COLLECT_EVERY = 20
_EVENT_EVERY = 10
"""In requests."""
_MOST_SHOWN = 10


def measure(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """One row: passes a rank, and where ranks differ."""
    events = TableEvents(options.soak_table) if options.soak_table else None
    try:
        row = _mixed(session, options, events)
    finally:
        if events is not None:
            events.restore()
    print("ranks", row, file=sys.stderr, flush=True)
    yield row


def _mixed(
    session: Session, options: argparse.Namespace, events: TableEvents | None
) -> dict[str, Any]:
    """Mixed batches until there are enough passes, changing configurations and tables."""
    session.flush()
    passes: list[Pass] = []
    happened = 0
    for i, (prompts, new) in enumerate(load(session)):
        session.use(session.configurations[i // _EVENT_EVERY % len(session.configurations)])
        if events is not None and i % _EVENT_EVERY == _EVENT_EVERY - 1:
            events.next()
            happened += 1
        session.tag()
        session.ask(prompts, new)
        if i % _COLLECT_EVERY == _COLLECT_EVERY - 1:
            passes += session.collect(all_ranks=True)
            if session.late or len(passes) >= options.rank_passes * options.real_tp:
                break
    by_rank: dict[int, list[Pass]] = {}
    for one in passes:
        by_rank.setdefault(one["gpu"], []).append(one)
    found = list(differences(by_rank, alike=options.real_dp == 1))
    return {
        "passes": {str(rank): len(mine) for rank, mine in sorted(by_rank.items())},
        "table_events": happened, "differences": len(found), "shown": found[:_MOST_SHOWN],
        "graphs": sum(one["graph"] for one in passes), "mha": sum(one["mha"] for one in passes),
    }  # fmt: skip


def differences(by_rank: Mapping[int, Sequence[Pass]], *, alike: bool) -> Iterator[dict[str, Any]]:
    """Passes that are not the same on all ranks.

    `alike`: also what a pass ran must be the same; data-parallel ranks have batches of their own.
    """
    for i, passes in enumerate(zip(*by_rank.values(), strict=False)):
        kinds = {(one["graph"], ran(one), one["q"]) if alike and "q" in one else one["graph"]
                 for one in passes}  # fmt: skip
        if len(kinds) > 1:
            ranks = dict(zip(map(str, by_rank), passes, strict=True))
            yield {"pass": i, "ranks": ranks}
    lengths = {len(passes) for passes in by_rank.values()}
    if len(lengths) > 1:
        yield {"passes": {str(rank): len(passes) for rank, passes in by_rank.items()}}
