"""What an engine pays beside the measured kernels, added to a table's measurements."""

from __future__ import annotations

from collections.abc import Callable

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Measurement

Pricing = Callable[[Measurement, Batch], Measurement | None]
"""A measurement that succeeded, and its batch, to what it costs in the engine; None where the
engine never runs that arm on such a batch."""


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
        baseline=dispatcher.baseline, forced=dispatcher.forced,
    )  # fmt: skip
