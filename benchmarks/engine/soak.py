"""Mixed load for a while, with tables reloaded and broken in between: does a pass fail or grow?"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.engine.cases import PAGE
from benchmarks.engine.session import Pass, Session, way

__all__ = ["MEMORY", "TableEvents", "load", "measure"]

_SHORTEST, _LONGEST = 8, 8192
_MOST_TOKENS = 24
_MOST_SEQUENCES = 16
_HEADS = 8
_EVENT_EVERY_S = 5.0
_ROW_EVERY_S = 60.0
MEMORY = ("used_mib", "reserved_mib", "allocated_mib", "peak_mib", "host_mib", "logits_mib")
"""The indexer's logits, fp32 of new tokens times keys, are the largest tensor of a prefill: PyTorch
keeps a block of each largest size, so what it reserves grows with them."""


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
    """A row a minute, each of all so far, for runs that are cut off."""
    events = TableEvents(options.soak_table) if options.soak_table else None
    session.flush()
    plugin = next((one for one in session.configurations if one.plugin), session.configurations[0])
    session.use(plugin)
    soak = _Soak(plugin.name)
    try:
        for _ in _run(session, soak, options, events):
            yield soak.row()
    finally:
        if events is not None:
            events.restore()


@dataclass(slots=True)
class _Soak:
    """What has happened so far."""

    configuration: str
    seconds: float = 0.0
    requests: int = 0
    passes: int = 0
    wrong: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    """How prefills ran."""
    readings: list[Pass] = field(default_factory=list)
    """Passes at which memory was read: one for each time that the engine was asked."""
    told: int = 0
    """Readings that are in a row."""

    def answered(self, answers: Sequence[dict[str, Any]], new: int) -> None:
        self.requests += len(answers)
        self.wrong += [str(one)[:200] for one in answers if len(one["output_ids"]) != new]

    def ran(self, passes: Iterable[Pass]) -> None:
        for one in passes:
            self.passes += 1
            if one["mode"] == "EXTEND":
                self.ways[way(one)] += 1
            if "used_mib" in one:
                # Only prefills have noted their new tokens.
                logits = 4 * one.get("q", 0) * one.get("kv", 0) >> 20
                self.readings.append(one | {"logits_mib": logits})

    def row(self) -> dict[str, Any]:
        """What has happened, with the memory of readings that no row has told."""
        new, self.told = self.readings[self.told :], len(self.readings)
        row = {
            "configuration": self.configuration, "seconds": round(self.seconds, 1),
            "requests": self.requests, "passes": self.passes, "wrong_answers": self.wrong[:10],
            "table_events": dict(sorted(self.events.items())),
            "ways": dict(sorted(self.ways.items())),
        }  # fmt: skip
        print("soak", row, file=sys.stderr, flush=True)
        return row | {"curve": [[one[what] for what in MEMORY] for one in new]}


def _run(
    session: Session, soak: _Soak, options: argparse.Namespace, events: TableEvents | None
) -> Iterator[None]:
    """Load the engine; yields whenever a row is due."""
    next_event, next_row = _EVENT_EVERY_S, _ROW_EVERY_S
    for prompts, new in load(session):
        begin = time.monotonic()
        if soak.seconds > options.soak_seconds:
            break
        if events is not None and soak.seconds > next_event:
            soak.events[events.next()] += 1
            next_event = soak.seconds + _EVENT_EVERY_S
        session.tag(memory=True)
        _, found = session.ask(prompts, new)
        soak.answered(found, new)
        if soak.requests % 50 < len(found):
            soak.ran(session.collect())
        soak.seconds += time.monotonic() - begin
        if soak.seconds > next_row:
            yield
            next_row = soak.seconds + _ROW_EVERY_S
    soak.ran(session.collect())
    yield


def load(session: Session) -> Iterator[tuple[list[list[int]], int]]:
    """Prompts, half of them behind one of a few prefixes, and how many tokens to generate.

    The same in each engine, so that the curves of two can be laid side by side.
    """
    random = Random(11)
    heads = [session.tokens(PAGE * random.randrange(1, 160), i) for i in range(_HEADS)]
    while True:
        count = random.choice((1, 1, 1, 2, 4, 8, _MOST_SEQUENCES))
        most = _LONGEST if count < 4 else _LONGEST // 4
        prompts = []
        for _ in range(count):
            length = int(exp(random.uniform(log(_SHORTEST), log(most))))
            head = random.choice(heads) if random.random() < 0.5 else []
            prompts.append(head + session.tokens(length, random.random()))
        yield prompts, random.randrange(1, _MOST_TOKENS)
