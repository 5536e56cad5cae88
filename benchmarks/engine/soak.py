"""Mixed load for a while, with tables reloaded and broken in between: does a pass fail or grow?"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from math import exp, log
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.engine.cases import PAGE
from benchmarks.engine.session import Pass, Session

__all__ = ["TableEvents", "growth_of", "load", "measure"]

_SHORTEST, _LONGEST = 8, 8192
_MOST_TOKENS = 24
_MOST_SEQUENCES = 16
_HEADS = 8
_EVENT_EVERY_S = 5.0


class TableEvents:
    """What happens to a table file while the engine serves; `restore` puts the first one back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._good = path.read_bytes()
        self._events = cycle(("reload", "corrupt", "reload", "missing", "reload", "cut"))

    def next(self) -> str:
        """Do the next thing; its name."""
        event = next(self._events)
        if event == "missing":
            self._path.unlink(missing_ok=True)
        else:
            self._replace(self._content(event))
        return event

    def restore(self) -> None:
        """The table as it was found."""
        self._replace(self._good)

    def _content(self, event: str) -> bytes:
        if event == "corrupt":
            return b"this is no table\n" * 64
        return self._good[: len(self._good) // 2] if event == "cut" else self._good

    def _replace(self, content: bytes) -> None:
        # As a tuner does it: a reader sees the old file or the new one.
        part = self._path.with_suffix(".part")
        part.write_bytes(content)
        part.replace(self._path)


def measure(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """One row."""
    events = TableEvents(options.soak_table) if options.soak_table else None
    try:
        row = _soaked(session, options.soak_seconds, events)
    finally:
        if events is not None:
            events.restore()
    print("soak", row, file=sys.stderr, flush=True)
    yield row


def _soaked(session: Session, seconds: float, events: TableEvents | None) -> dict[str, Any]:
    session.flush()
    plugin = next((one for one in session.configurations if one.plugin), session.configurations[0])
    session.use(plugin)
    passes: list[Pass] = []
    happened: list[str] = []
    wrong: list[str] = []
    asked, begin = 0, time.monotonic()
    next_event = begin + _EVENT_EVERY_S
    for prompts, new in load(session):
        now = time.monotonic()
        if now - begin > seconds:
            break
        if events is not None and now > next_event:
            happened.append(events.next())
            next_event = now + _EVENT_EVERY_S
        session.tag(memory=True)
        _, found = session.ask(prompts, new)
        asked += len(found)
        wrong += [str(one)[:200] for one in found if len(one["output_ids"]) != new]
        if asked % 50 < len(found):
            passes += _readings(session)
    passes += _readings(session)
    return {
        "configuration": plugin.name, "seconds": round(time.monotonic() - begin, 1),
        "requests": asked, "wrong_answers": wrong[:10],
        "table_events": {name: happened.count(name) for name in sorted(set(happened))},
        "memory_mib": {
            what: growth_of([one[what] for one in passes])
            for what in ("used_mib", "reserved_mib", "peak_mib", "host_mib")
        },
    }  # fmt: skip


def _readings(session: Session) -> list[Pass]:
    return [one for one in session.collect() if "used_mib" in one]


def load(session: Session) -> Iterator[tuple[list[list[int]], int]]:
    """Prompts, half of them behind one of a few prefixes, and how many tokens to generate."""
    random = Random(11)
    heads = [session.tokens(PAGE * random.randrange(1, 160)) for _ in range(_HEADS)]
    while True:
        count = random.choice((1, 1, 1, 2, 4, 8, _MOST_SEQUENCES))
        most = _LONGEST if count < 4 else _LONGEST // 4
        prompts = []
        for _ in range(count):
            length = int(exp(random.uniform(log(_SHORTEST), log(most))))
            head = random.choice(heads) if random.random() < 0.5 else []
            prompts.append(head + session.tokens(length))
        yield prompts, random.randrange(1, _MOST_TOKENS)


def growth_of(values: Sequence[int]) -> dict[str, float] | None:
    """Medians of the second and of the last quarter: the first one fills caches."""
    quarter = len(values) // 4
    if not quarter:
        return None
    early, late = median(values[quarter : 2 * quarter]), median(values[-quarter:])
    return {"early": early, "late": late, "growth": late - early, "max": max(values)}
