"""Weighted batches: what an engine runs and how often, drawn from a trace or a decision log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from random import Random

from nsa_tune._errors import UsageError
from nsa_tune._files import open_regular
from nsa_tune.autotune.workload.requests import read_requests
from nsa_tune.autotune.workload.simulation import SchedulerConfig, passes
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.engines.decision_log import SCHEMA, read_decisions

_log = logging.getLogger(__name__)

WeightedBatch = tuple[Batch, float]

_SETTINGS = (4096, 2), (8192, 3), (16384, 4)
SCHEDULERS = tuple(SchedulerConfig(chunk_tokens=chunk, next_n=n) for chunk, n in _SETTINGS)
"""All of these are simulated, because a trace does not say how its engine is configured."""
_DRAWN = 150  # extend passes to draw, and decode passes too
_MOST_PASSES = 5_000_000  # that are simulated, with each scheduler: some minutes


def weighted_batches(path: Path, *, seed: int = 0, drawn: int = _DRAWN) -> list[WeightedBatch]:
    """Draw at most `drawn` extend and `drawn` decode passes from `path`; the weights are counts.

    Every pass is as likely as any other of its kind, so a frequent batch is drawn more often.
    UsageError when `path` is neither a trace nor a decision log, or has no batch.
    """
    draw = _logged if is_decision_log(path) else _simulated
    words = Counter(map(str, draw(path, Random(seed), drawn)))
    if not words:
        raise UsageError(f"{path} has no batch with the lengths of its sequences")
    return [(Batch.parse(word), float(count)) for word, count in sorted(words.items())]


def is_decision_log(path: Path) -> bool:
    """Whether `path` can be read and is an engine's decision log, by its first line."""
    with suppress(OSError), open_regular(path) as file:
        return SCHEMA.encode() in file.readline(1 << 16)
    return False


def _simulated(path: Path, random: Random, drawn: int) -> Iterable[Batch]:
    requests = read_requests(path)
    for i, scheduler in enumerate(SCHEDULERS):
        share = drawn // len(SCHEDULERS) + (i < drawn % len(SCHEDULERS))
        # A uniform sample of a stream of unknown length (Vitter's algorithm R), of each kind.
        kept: dict[bool, list[Batch]] = {True: [], False: []}
        seen = Counter[bool]()
        for number, forward in enumerate(passes(requests, scheduler)):
            if number == _MOST_PASSES:
                _log.warning("%s: batches are drawn from the first %d passes", path, number)
                break
            kind, batches = forward.is_extend, kept[forward.is_extend]
            seen[kind] += 1
            if len(batches) < share:
                batches.append(forward.batch())
            elif (slot := random.randrange(seen[kind])) < share:
                batches[slot] = forward.batch()
        yield from chain(*kept.values())


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
    for by_batch in filter(None, counts.values()):
        words = random.choices(list(by_batch), list(by_batch.values()), k=drawn)
        yield from map(Batch.parse, words)
