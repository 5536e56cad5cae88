"""Ranks of one model must decide alike: they compare at start what they decide by.

A rank's decisions follow from the batch, which all ranks share, and from its table. So it is
enough that all have the same table, read by the same version of nsa-tune on the same kind of GPU.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any, Protocol

from nsa_tune.backend.costmodel.weights import stamp_of
from nsa_tune.backend.dispatch.dispatcher import Dispatcher

__all__ = ["NOTHING", "Exchange", "Store", "decides_by", "table_digest"]

NOTHING = "no table"
"""What a rank says that decides nothing."""
_SECONDS = 60


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
    policies = dispatcher.policies.values()
    parts = (
        table_digest(dispatcher),
        stamp_of([policy.features for policy in policies]),
        repr(dispatcher.setting),
        repr(sorted(dispatcher.forced.items())),
        *map(repr, more),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


class Store(Protocol):
    """A key-value store that ranks share, as `torch.distributed.Store` is one."""

    def set(self, key: str, value: str) -> Any:
        """Write."""
        ...

    def get(self, key: str) -> bytes:
        """Read what is there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> Any:
        """Return once all are there; raises when they are not in time."""
        ...


class Exchange:
    """Tells the other ranks of a group a text, and hears theirs.

    A rank without the plug-in says nothing. That must not hang the others, as a collective would:
    hence a store, and a limit to how long it is waited for.
    """

    def __init__(self, store: Store, rank: int, ranks: int, *, seconds: float = _SECONDS) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._limit = timedelta(seconds=seconds)
        self._count = 0

    def differing(self, text: str) -> str | None:
        """How what the ranks say differs from `text`, in words; None when all say the same."""
        self._count += 1
        problem = self._heard("digest", text)
        # A rank that waited in vain must not be alone in giving up.
        verdict = self._heard("verdict", "agreed" if problem is None else "differs")
        return problem or (verdict and "another rank has found a difference")

    def _heard(self, what: str, text: str) -> str | None:
        keys = [f"nsa-tune/{self._count}/{what}/{rank}" for rank in range(self._ranks)]
        self._store.set(keys[self._rank], text)
        try:
            self._store.wait(keys, self._limit)
        except (RuntimeError, ValueError) as error:
            return f"not every rank has answered ({str(error).splitlines()[0]})"
        heard = [self._store.get(key).decode() for key in keys]
        others = [rank for rank, one in enumerate(heard) if one != text]
        if not others:
            return None
        return f"rank {self._rank} says {text}, rank {others[0]} {heard[others[0]]}"
