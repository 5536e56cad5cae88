"""Which dispatcher may steer an engine."""

from __future__ import annotations

import logging
from functools import cache

from nsa_tune.backend.baselines import Baseline, baseline_of
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.dispatch.table_planner import Match
from nsa_tune.engines.edge import Edge


def opened(
    edge: Edge, baseline: Baseline, model: str, heads: int, kv_dtype: str, layers: int | None = None
) -> Dispatcher | None:
    """The dispatcher that may steer; None, and a line that says why, where none may.

    Raises:
        NoTunedData: when there must be a table and is none.
    """
    dispatcher = _dispatcher(baseline.name, model, heads, kv_dtype, layers)
    if dispatcher.match is Match.BASELINE:
        return None  # opening has said so
    if dispatcher.match is Match.ARCHITECTURE:
        # Of two GPUs of one architecture one may have a seventh of the other's arithmetic.
        text = f"{edge.engine} decides by itself: that table is of another GPU"
        edge.say_once(logging.WARNING, text)
        return None
    return dispatcher


@cache
def _dispatcher(
    baseline: str, model: str, heads: int, kv_dtype: str, layers: int | None
) -> Dispatcher:
    return Dispatcher.open(
        model=model, heads=heads, kv_dtype=kv_dtype, baseline=baseline_of(baseline), layers=layers
    )
