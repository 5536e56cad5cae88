"""Whether the engine says the same in every configuration: greedy tokens, request by request."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from math import exp, log
from random import Random
from statistics import median
from typing import Any

from benchmarks.engine.cases import PAGE
from benchmarks.engine.configurations import Configuration
from benchmarks.engine.session import Session

__all__ = ["compared", "first_difference", "measure"]

_BATCH = 16
_SHORTEST, _LONGEST = 16, 6000
_MOST_EXPLAINED, _NEW = 40, 16

Tokens = list[int]


def measure(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """A row a configuration; the default is run twice, to show how far it agrees with itself.

    Those asked for, or the plug-in's.
    """
    prompts = _prompts(session, options.outputs)
    default, names = session.default, options.output_configurations
    chosen = [
        one
        for one in (session.named(names) if names else session.configurations)
        if one != default and (names or one.plugin)
    ]
    own = _answers(session, default, prompts)
    for configuration in (default, *chosen):
        if session.late:
            yield {"configuration": configuration.name, "skipped": "out of time"}
            continue
        other = _answers(session, configuration, prompts)
        row = {"configuration": configuration.name, "against": default.name}
        row |= compared(own, other)
        row |= _explained(session, default, prompts, own, other)
        print("outputs", row, file=sys.stderr, flush=True)
        yield row


def _prompts(session: Session, count: int) -> list[Tokens]:
    """Prompts of log-uniform lengths; every second one shares a prefix with the one before it."""
    random = Random(7)
    found: list[Tokens] = []
    for i in range(count):
        length = int(exp(random.uniform(log(_SHORTEST), log(_LONGEST))))
        shared = len(found[-1]) // PAGE * PAGE if i % 2 else 0
        head = found[-1][:shared] if shared else []
        found.append(head + session.tokens(length, f"output {i}"))
    return found


def _answers(
    session: Session, configuration: Configuration, prompts: Sequence[Tokens]
) -> list[Tokens]:
    session.flush()
    session.use(configuration)
    session.tag()
    found: list[Tokens] = []
    for begin in range(0, len(prompts), _BATCH):
        # First one half, then the other, so that shared prefixes are read from the cache.
        batch = prompts[begin : begin + _BATCH]
        answers: dict[int, Tokens] = {}
        for part in (0, 1):
            _, given = session.ask(batch[part::2], _NEW) if batch[part::2] else (0.0, [])
            for i, one in enumerate(given):
                answers[part + 2 * i] = one["output_ids"]
        found += [answers[i] for i in range(len(batch))]
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position in which two answers differ; None where they are equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def compared(own: Sequence[Tokens], other: Sequence[Tokens]) -> dict[str, Any]:
    """How many answers are equal, and where the others part."""
    found = [first_difference(a, b) for a, b in zip(own, other, strict=True)]
    differing = [at for at in found if at is not None]
    return {
        "requests": len(found), "equal": len(found) - len(differing),
        "share_equal": round(1 - len(differing) / len(found), 4),
        "first_difference": {
            "median": median(differing) if differing else None,
            "positions": {at: differing.count(at) for at in sorted(set(differing))},
        },
        "tokens_per_answer": len(own[0]),
    }  # fmt: skip


def _explained(
    session: Session,
    default: Configuration,
    prompts: Sequence[Tokens],
    own: Sequence[Tokens],
    other: Sequence[Tokens],
) -> dict[str, Any]:
    """How close the two best tokens were where answers part, and where they do not.

    Rounding can only change a choice between tokens that are nearly as likely.
    """
    session.use(default)
    differing: list[float] = []
    equal: list[float] = []
    for prompt, a, b in zip(prompts, own, other, strict=True):
        at = first_difference(a, b)
        target = equal if at is None else differing
        if len(target) < _MOST_EXPLAINED and not session.late:
            target.append(_gap(session, prompt + a[: at or 0]))
    return {"gap_nats": {
        "where answers part": median(differing) if differing else None,
        "largest where answers part": max(differing, default=None),
        "where they are equal": median(equal) if equal else None,
    }}  # fmt: skip


def _gap(session: Session, prompt: Tokens) -> float:
    """The difference in log-likelihood between the two best next tokens."""
    _, found = session.ask([prompt], return_logprob=True, top_logprobs_num=2)
    best, second = found[0]["meta_info"]["output_top_logprobs"][0][:2]
    return round(float(best[0]) - float(second[0]), 5)
