"""Batches to tune on that an engine runs, drawn from a trace with a seeded generator.

A trace of requests is put through a simulated scheduler (`simulation`); a decision log that the
plug-in of an engine wrote (NSA_TUNE_LOG) has the batches already, each with its count.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

from nsa_tune._errors import UsageError
from nsa_tune.autotune.workload.requests import read_requests
from nsa_tune.autotune.workload.simulation import Engine, passes
from nsa_tune.backend.engines.decision_log import SCHEMA, read_decisions
from nsa_tune.backend.types.batch import Batch, Mode

__all__ = ["ENGINES", "weighted_batches"]

_log = logging.getLogger(__name__)

ENGINES = (
    Engine(chunk_tokens=4096, next_n=2),
    Engine(chunk_tokens=8192, next_n=3),
    Engine(chunk_tokens=16384, next_n=4),
)
"""A trace does not say how the engine that will serve it is set up: these are simulated."""
_DRAWN = 150
"""Passes of each kind."""


def weighted_batches(
    path: Path, *, seed: int = 0, drawn: int = _DRAWN
) -> list[tuple[Batch, float]]:
    """At most `drawn` extend and `drawn` decode passes of the trace, and how often each was drawn.

    Every pass is as likely to be drawn as any other of its kind, so a batch is drawn as often as it
    occurs.

    Raises:
        UsageError: when `path` is neither a trace nor a decision log, or has no batch.
    """
    random = Random(seed)
    batches = _logged(path, random, drawn) if _is_log(path) else _simulated(path, random, drawn)
    words = Counter(map(str, batches))
    if not words:
        raise UsageError(f"{path} has no batch with the lengths of its sequences")
    return [(Batch.parse(word), float(count)) for word, count in sorted(words.items())]


def _is_log(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return SCHEMA.encode() in file.readline(1 << 16)
    except OSError as error:
        raise UsageError(f"the trace {path} cannot be read: {error.strerror}") from error


def _simulated(path: Path, random: Random, drawn: int) -> Iterable[Batch]:
    requests = read_requests(path)
    for i, engine in enumerate(ENGINES):
        share = drawn // len(ENGINES) + (i < drawn % len(ENGINES))
        extends, decodes = _Reservoir(share, random), _Reservoir(share, random)
        for one in passes(requests, engine):
            kept = extends if one.is_extend else decodes
            slot = kept.slot()
            if slot is not None:
                kept.batches[slot] = one.batch()
        yield from extends.batches.values()
        yield from decodes.batches.values()


class _Reservoir:
    """A uniform sample of a stream of unknown length (Vitter's algorithm R)."""

    def __init__(self, size: int, random: Random) -> None:
        self.batches: dict[int, Batch] = {}
        self._size, self._random, self._seen = size, random, 0

    def slot(self) -> int | None:
        """Where to put the next one of the stream, or None to pass it by."""
        self._seen += 1
        if self._seen <= self._size:
            return self._seen - 1
        slot = self._random.randrange(self._seen)
        return slot if slot < self._size else None


def _logged(path: Path, random: Random, drawn: int) -> Iterable[Batch]:
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    sums_only = 0
    for decision in read_decisions(path):
        if decision.batch.lens is None:
            sums_only += decision.count
        else:
            counts[decision.batch.mode is Mode.EXTEND][str(decision.batch)] += decision.count
    if sums_only:
        _log.warning("%s: %d decisions have sums only and cannot be measured", path, sums_only)
    for found in counts.values():
        if found:
            words = random.choices(list(found), list(found.values()), k=drawn)
            yield from map(Batch.parse, words)
