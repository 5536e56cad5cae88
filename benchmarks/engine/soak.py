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
from statistics import median
from typing import Any

from benchmarks.engine.cases import PAGE
from benchmarks.engine.session import Pass, Session, way

__all__ = ["TableEvents", "growth_of", "load", "measure", "steps_of"]

_SHORTEST, _LONGEST = 8, 8192
_MOST_TOKENS = 24
_MOST_SEQUENCES = 16
_HEADS = 8
_EVENT_EVERY_S = 5.0
_PRINT_EVERY_S = 60.0
_STEP_MIB = 64


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
    """One row; once a minute the row so far is printed, for runs that are cut off."""
    events = TableEvents(options.soak_table) if options.soak_table else None
    session.flush()
    plugin = next((one for one in session.configurations if one.plugin), session.configurations[0])
    session.use(plugin)
    soak = _Soak(plugin.name)
    try:
        _run(session, soak, options.soak_seconds, events)
    finally:
        if events is not None:
            events.restore()
    print("soak", soak.row(), file=sys.stderr, flush=True)
    yield soak.row()


@dataclass(slots=True)
class _Soak:
    """What has happened so far."""

    configuration: str
    begin: float = field(default_factory=time.monotonic)
    requests: int = 0
    wrong: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    """How prefills ran."""
    readings: list[Pass] = field(default_factory=list)
    """Passes at which memory was read."""

    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def answered(self, answers: Sequence[dict[str, Any]], new: int) -> None:
        self.requests += len(answers)
        self.wrong += [str(one)[:200] for one in answers if len(one["output_ids"]) != new]

    def ran(self, passes: Iterable[Pass]) -> None:
        for one in passes:
            if one["mode"] == "EXTEND":
                self.ways[way(one)] += 1
            if "used_mib" in one:
                self.readings.append(one)

    def row(self) -> dict[str, Any]:
        return {
            "configuration": self.configuration, "seconds": round(self.seconds(), 1),
            "requests": self.requests, "wrong_answers": self.wrong[:10],
            "table_events": dict(sorted(self.events.items())),
            **self.passes(),
        }  # fmt: skip

    def passes(self) -> dict[str, Any]:
        """What the passes alone tell."""
        return {
            "ways": dict(sorted(self.ways.items())),
            "memory_mib": {
                what: growth_of([one[what] for one in self.readings])
                for what in ("used_mib", "reserved_mib", "peak_mib", "host_mib")
            },
            "reserved_steps": list(steps_of(self.readings)),
        }


def _run(session: Session, soak: _Soak, seconds: float, events: TableEvents | None) -> None:
    next_event, next_print = _EVENT_EVERY_S, _PRINT_EVERY_S
    for prompts, new in load(session):
        now = soak.seconds()
        if now > seconds:
            break
        if events is not None and now > next_event:
            soak.events[events.next()] += 1
            next_event = now + _EVENT_EVERY_S
        if now > next_print:
            print("soak so far", soak.row(), file=sys.stderr, flush=True)
            next_print = now + _PRINT_EVERY_S
        session.tag(memory=True)
        _, found = session.ask(prompts, new)
        soak.answered(found, new)
        if soak.requests % 50 < len(found):
            soak.ran(session.collect())
    soak.ran(session.collect())


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


def steps_of(readings: Sequence[Pass]) -> Iterator[dict[str, Any]]:
    """Where PyTorch reserved more than `_STEP_MIB` at once, from the second quarter on.

    The largest tensor of a prefill is the indexer's logits, fp32 of its new tokens times all its
    keys. PyTorch keeps a block of each largest size, so that this grows with each largest batch.
    """
    most, before = 0, readings[0]["reserved_mib"] if readings else 0
    for i, one in enumerate(readings):
        # Only prefills have noted their new tokens.
        logits = one.get("q", 0) * one.get("kv", 0)
        grown = one["reserved_mib"] - before
        if grown > _STEP_MIB and i >= len(readings) // 4:
            yield {
                "pass": i, "grown_mib": grown, "logits_mib": round(logits * 4 / 2**20),
                "largest_so_far": logits > most,
            }  # fmt: skip
        most, before = max(most, logits), one["reserved_mib"]


def growth_of(values: Sequence[int]) -> dict[str, float] | None:
    """Medians of the second and of the last quarter: the first one fills caches."""
    quarter = len(values) // 4
    if not quarter:
        return None
    early, late = median(values[quarter : 2 * quarter]), median(values[-quarter:])
    return {"early": early, "late": late, "growth": late - early, "max": max(values)}
