"""The dispatcher that may steer an engine, and what the engine pays beside its measured kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from nsa_tune.backend.baselines import Baseline, baseline_of
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.dispatch.table_planner import Match
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Measurement
from nsa_tune.engines.edge import Edge

Pricing = Callable[[Measurement, Batch], Measurement | None]
"""A measurement that succeeded, and its batch, to what it costs in the engine; None where the
engine never runs that arm on such a batch."""


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


def with_costs(
    dispatcher: Dispatcher,
    point: str,
    setting: Setting,
    pricing: Pricing,
    *,
    without: frozenset[str] = frozenset(),
) -> Dispatcher:
    """`dispatcher` in `setting`, with `pricing` in the measurements of `point`, fitted anew.

    `without` names arms that this engine has no call for: were they the fastest, nothing would be
    decided.
    """
    table = dispatcher.table
    assert table is not None, "only a table steers"
    priced = (
        row if row.latency_us is None else pricing(row, Batch.parse(row.batch))
        for row in table.measurements
        if row.point == point and row.arm not in without
    )
    rows = [row for row in priced if row is not None]
    policies = dict(dispatcher.policies)
    policies[point] = Policy.fit(policies[point].point, setting, rows)
    return Dispatcher(
        setting, policies.values(), source=dispatcher.source, table=table,
        baseline=dispatcher.baseline, forced=dispatcher.forced, match=dispatcher.match,
    )  # fmt: skip


def slower(row: Measurement, more_us: float) -> Measurement:
    """A measurement that succeeded, with `more_us` on top."""
    assert row.latency_us is not None, "failures are not priced"
    return replace(
        row,
        latency_us=row.latency_us + more_us,
        low_us=None if row.low_us is None else row.low_us + more_us,
        high_us=None if row.high_us is None else row.high_us + more_us,
    )
