"""The ranks of one engine decide alike, or none decides.

A rank that replays one graph while another runs a different one would wait for it for ever. So the
ranks compare what they decide from before the first decision. They use the store that PyTorch's
process group keeps, which needs no collective: a rank without the plug-in does not stop the others.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import fields
from typing import Any, Protocol

from nsa_tune import __version__
from nsa_tune.backend.dispatch.dispatcher import Dispatcher

NOTHING = "no table"
"""What a rank says that decides nothing."""
_ON, _OFF = b"on", b"off"
_FIRST_POLL_S, _POLL_S, _LATE = 0.001, 0.05, 8
"""Ranks mostly come at the same time; a late one is noticed by an eighth of the wait later."""


class Store(Protocol):
    """What is used of torch.distributed's `Store`."""

    def set(self, key: str, value: str, /) -> Any:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value if the key has `expected`, or, where that is "", has none; its value then."""


def agree(
    store: Store,
    question: str,
    answer: str,
    *,
    rank: int,
    ranks: int,
    timeout_s: float = 60.0,
) -> bool:
    """Whether all ranks gave the same answer in time. The result is the same on each rank.

    The first rank that knows writes the verdict, and each rank goes by what is written. So a rank
    that is late reads that it was too late.

    Args:
        store: shared by the ranks.
        question: what is compared; one name for one question.
        answer: this rank's.
        rank: this rank's number, from 0.
        ranks: how many there are.
        timeout_s: how long to wait for the others, in seconds.
    """
    name = f"nsa_tune/{question}"
    store.set(f"{name}/{rank}", answer)
    keys = [f"{name}/{number}" for number in range(ranks)]
    begin = time.monotonic()
    while not store.check(keys) and (waited_s := time.monotonic() - begin) < timeout_s:
        if store.check([f"{name}/verdict"]):
            break
        time.sleep(min(max(waited_s / _LATE, _FIRST_POLL_S), _POLL_S))
    alike = store.check(keys) and all(store.get(key) == answer.encode() for key in keys)
    verdict = store.compare_set(f"{name}/verdict", "", (_ON if alike else _OFF).decode())
    return verdict == _ON


def refuse(store: Store, question: str) -> None:
    """Answer for all ranks that nothing is agreed on, without waiting for them."""
    store.compare_set(f"nsa_tune/{question}/verdict", "", _OFF.decode())


def silent(store: Store, question: str, *, ranks: int) -> list[int]:
    """The ranks that have not answered so far."""
    answers = [f"nsa_tune/{question}/{number}" for number in range(ranks)]
    return [number for number, answer in enumerate(answers) if not store.check([answer])]


def table_digest(dispatcher: Dispatcher) -> str:
    """32 hex digits that name the key and the measurements of the table behind `dispatcher`."""
    table = dispatcher.table
    digest = hashlib.sha256()
    if table is not None:
        digest.update(repr(table.key).encode())
        for row in table.measurements:
            digest.update(repr(row).encode())
    return digest.hexdigest()[:32]


def decides_by(dispatcher: Dispatcher, *more: object) -> str:
    """All that the answers of `dispatcher` follow from, as one digest; `more` is the engine's."""
    setting = dispatcher.setting
    parts = (
        __version__,
        table_digest(dispatcher),
        *(_ordered(getattr(setting, field.name)) for field in fields(setting)),
        repr(sorted(dispatcher.forced.items())),
        *map(repr, more),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _ordered(value: object) -> str:
    """`repr`, with a set in order: without it each process has its own."""
    return repr(sorted(value)) if isinstance(value, frozenset) else repr(value)
