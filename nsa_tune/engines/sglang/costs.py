"""What SGLang pays beside the kernels that tables have times of.

**Once a pass** flashmla_sparse over packed fp8 costs more than each layer's kernels. The indexer
then hands over offsets into the batch's own keys instead of pool slots, and SGLang makes what these
need when it prepares the pass (dsa_backend.py, 0.5.15: 904-932, 0.5.23: 1310-1345): a
`repeat_interleave` whose length the host must read from the device; with a prefix also a slice a
sequence and a Python `sum` over a tensor. No measurement holds that, for it is the engine's own
work. It is added here to what the arm takes once a pass, so that flashmla_sparse is taken only
where all layers together gain more than it costs.

**In a layer where SGLang itself copies** `flashmla_sparse` takes longer. Tables read back as
nsa-tune does: an H200 takes 59 us for 116,212 tokens, and 353 as SGLang does. Their arms compute
queries in place among zeros of 64 heads, which takes longer than to compute them by themselves.
SGLang writes the zeros and copies, 178 us each for 8192 queries of 16 heads, and nsa-tune copies in
82 (PyTorch's profiler). Seven tenths of the difference are charged: so estimates are equally far
off, by 0.7 and 0.8 % on average, for an engine in which SGLang copies and one in which nsa-tune
does.

**In a layer of dense MHA** SGLang runs more than the arms `mha/...` hold. They project latents by
bf16 weights, and FlashInfer plans its attention once a pass. SGLang quantizes the latents for its
fp8 weights, and prepares FlashAttention-3 in every layer. What it has read back from an fp8 pool it
copies once more (forward_mha.py, `.contiguous()`). Microseconds of these kernels in 24 prefills of
an H200, by PyTorch's profiler.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import NOT_SGLANGS, SGLANGS_TRITON, KVLayout
from nsa_tune.backend.types.records import Measurement
from nsa_tune.engines.dispatchers import slower, with_costs
from nsa_tune.engines.sglang.eligible import PADDED_HEADS

PASS_US = 300.0
"""For waiting until the device has caught up: the launches that the host had queued ahead. An
assumption, on the careful side; it depends on the host and on the model around the attention."""
SEQUENCE_US = 20.0
"""Host work a sequence, in a batch with a prefix; `benchmarks.plugin` times it, at 5 to 20 us."""
_TOKEN_US = 0.0025
_ROW_US, _ROW_HEAD_US = 0.0153, 0.00051
"""0.023 us for 16 heads: zeros are written for all 64 heads, queries copied for those there are."""
_PREPARE_US = 2.9
_QUANTIZE_US, _QUANTIZE_TOKEN_US = 1.2, 0.00025
_COPY_US, _COPY_TOKEN_US = 1.6, 0.0009

_POINT = "prefill"
_RAGGED = SGLANGS_TRITON | {"mla/flashmla_sparse"}
"""Arms that read a packed pool back."""


def cost_us(batch: Batch) -> float:
    """What a pass over `batch` takes longer with flashmla_sparse, all layers' kernels aside."""
    return PASS_US + (SEQUENCE_US * batch.batch_size if batch.prefix_tokens else 0.0)


@cache
def without_unsupported(
    dispatcher: Dispatcher, without: frozenset[str] = NOT_SGLANGS
) -> Dispatcher:
    """`dispatcher` without the arms that SGLang's plug-in does not take."""
    assert dispatcher.table is not None, "only a table steers"
    if without.isdisjoint(row.arm for row in dispatcher.table.measurements):
        return dispatcher
    setting = dispatcher.setting
    return with_costs(dispatcher, _POINT, setting, lambda row, _: row, without=without)


@cache
def with_pass_overhead(
    dispatcher: Dispatcher, layers: int, *, swapped_read_back: bool = True,
    without: frozenset[str] = NOT_SGLANGS,
) -> Dispatcher:  # fmt: skip
    """`dispatcher`, with these costs in passes that read back, for a model of `layers` layers.

    `swapped_read_back`: prefixes are read back by nsa-tune's kernel, as they were measured.
    """
    setting = replace(dispatcher.setting, layers=layers)
    layout = None if swapped_read_back else setting.layout
    pricing = partial(_with_overhead, reads_back=layout)
    return with_costs(dispatcher, _POINT, setting, pricing, without=without)


def untaken(impls: frozenset[str]) -> frozenset[str]:
    """The arms that the plug-in does not take where SGLang has these kernels."""
    return NOT_SGLANGS | {arm for arm in SGLANGS_TRITON if arm.removeprefix("mla/") not in impls}


def sharing(dispatcher: Dispatcher, kept: float) -> Dispatcher:
    """`dispatcher` where queries keep this share of the selection before theirs, beyond chance."""
    setting, policies = replace(dispatcher.setting, kept=kept), dict(dispatcher.policies)
    policies[_POINT] = policies[_POINT].at(replace(policies[_POINT].setting, kept=kept))
    return Dispatcher(
        setting, policies.values(), source=dispatcher.source, table=dispatcher.table,
        baseline=dispatcher.baseline, forced=dispatcher.forced, match=dispatcher.match,
    )  # fmt: skip


def _with_overhead(row: Measurement, batch: Batch, *, reads_back: KVLayout | None) -> Measurement:
    """`reads_back` is the pool's layout where SGLang's own kernel reads prefixes back."""
    if row.arm not in _RAGGED or row.latency_us is None:
        return row
    more_us = 0.0 if reads_back is None else read_back_us(batch, reads_back)
    return slower(replace(row, pass_us=(row.pass_us or 0.0) + cost_us(batch)), more_us)


def longer_us(batch: Batch, layout: KVLayout, heads: int) -> float:
    """Microseconds a layer: both copies."""
    return read_back_us(batch, layout) + padding_us(batch, heads)


def read_back_us(batch: Batch, layout: KVLayout) -> float:
    """Microseconds a layer: the whole batch is read back from an fp8 pool if it has a prefix."""
    reads = layout is KVLayout.FP8_PACKED and batch.prefix_tokens > 0
    return _TOKEN_US * batch.kv_tokens if reads else 0.0


def padding_us(batch: Batch, heads: int) -> float:
    """Microseconds a layer: queries of fewer heads than FlashMLA takes."""
    return batch.q_tokens * (_ROW_US + _ROW_HEAD_US * heads) if heads < PADDED_HEADS else 0.0


def mha_projection_us(batch: Batch, layout: KVLayout) -> float:
    """Microseconds that a layer of dense MHA over `batch` takes longer than its arm."""
    us = _PREPARE_US + _QUANTIZE_US + _QUANTIZE_TOKEN_US * batch.kv_tokens
    if batch.prefix_tokens and layout is KVLayout.FP8_PACKED:
        us += _COPY_US + _COPY_TOKEN_US * batch.kv_tokens
    return us
