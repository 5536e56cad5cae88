"""What SGLang pays once a pass for flashmla_sparse over packed fp8, beside each layer's kernels.

The indexer then hands over offsets into the batch's own keys instead of pool slots, and SGLang
makes what these need when it prepares the pass (dsa_backend.py, 0.5.15: 904-932, 0.5.23:
1310-1345): a `repeat_interleave` whose length the host must read from the device; with a prefix
also a slice a sequence and a Python `sum` over a tensor. No measurement holds that, for it is the
engine's own work. It is added here to what the arm takes once a pass, so that flashmla_sparse is
taken only where all layers together gain more than it costs.

In each layer the prefix is read back as bf16. The tables have that by nsa-tune's kernel; where
SGLang's own runs, the arm takes so much longer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import NOT_SGLANGS, KVLayout
from nsa_tune.backend.types.records import Measurement
from nsa_tune.engines.dispatchers import with_costs
from nsa_tune.engines.sglang.costs.engine_copies import read_back_us

PASS_US = 300.0
"""For waiting until the device has caught up: the launches that the host had queued ahead. An
assumption, on the careful side; it depends on the host and on the model around the attention."""
SEQUENCE_US = 20.0
"""Host work a sequence, in a batch with a prefix; `benchmarks.plugin` times it, at 5 to 20 us."""

_POINT, _ARM = "prefill", "mla/flashmla_sparse"


def cost_us(batch: Batch) -> float:
    """What a pass over `batch` takes longer with flashmla_sparse, all layers' kernels aside."""
    return PASS_US + (SEQUENCE_US * batch.batch_size if batch.prefix_tokens else 0.0)


@cache
def without_unsupported(dispatcher: Dispatcher) -> Dispatcher:
    """`dispatcher` without the arms that SGLang's plug-in does not take."""
    assert dispatcher.table is not None, "only a table steers"
    if NOT_SGLANGS.isdisjoint(row.arm for row in dispatcher.table.measurements):
        return dispatcher
    setting = dispatcher.setting
    return with_costs(dispatcher, _POINT, setting, lambda row, _: row, without=NOT_SGLANGS)


@cache
def with_pass_overhead(
    dispatcher: Dispatcher, layers: int, *, swapped_read_back: bool = True
) -> Dispatcher:
    """`dispatcher`, with these costs in flashmla_sparse's passes, for a model of `layers` layers.

    `swapped_read_back`: prefixes are read back by nsa-tune's kernel, as they were measured.
    """
    setting = replace(dispatcher.setting, layers=layers)
    layout = None if swapped_read_back else setting.layout
    pricing = partial(_with_overhead, reads_back=layout)
    return with_costs(dispatcher, _POINT, setting, pricing, without=NOT_SGLANGS)


def _with_overhead(row: Measurement, batch: Batch, *, reads_back: KVLayout | None) -> Measurement:
    """`reads_back` is the pool's layout where SGLang's own kernel reads prefixes back."""
    if row.arm != _ARM or row.latency_us is None:
        return row
    more_us = 0.0 if reads_back is None else read_back_us(batch, reads_back)
    return replace(
        row,
        pass_us=(row.pass_us or 0.0) + cost_us(batch),
        latency_us=row.latency_us + more_us,
        low_us=None if row.low_us is None else row.low_us + more_us,
        high_us=None if row.high_us is None else row.high_us + more_us,
    )
