"""What vLLM pays beside the kernels that were measured.

- It gathers and widens the whole context of each prefill for flashmla_sparse, the new tokens too;
  the arm widens nothing without a prefix (flashmla_sparse.py, 0.33: 1116-1183).
- When it prepares a step for flashmla_sparse, it fills a row of request numbers for each prefill, a
  launch each (flashmla_sparse.py, 0.33: 572-583).
- MHA over a prefix is two calls, one for the new tokens and one for the context, whose results are
  merged (mla_attention.py, 0.33: 3227-3303). The arm mha/fa3_merged measures that. Where a table
  has no times of it, an assumption is added to the times of one call.
- Tokens that leave the decode kernel for flashmla_sparse cost the host more launches in each layer.
- MHA of dense MLA puts keys together by two copies, where the table has one kernel
  (mla_attention.py, 0.33: 2931-2964; one kernel too for 128 heads beside FlashInfer).

The numbers are assumptions on the careful side: a memory that moves 1 TB/s, and launches as slow as
a host without CUDA graphs makes them. Those of dense MLA were measured (docs/vllm.md).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from sys import maxsize

from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import SGLANGS_TRITON, KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Measurement
from nsa_tune.engines.dispatchers import slower, with_costs

SEQUENCE_US = 10.0
"""A prefill's row of request numbers, once a step."""
LAUNCH_US = 10.0
"""Two launches more a layer: MHA's second call and the merge."""
LEAVING_US = 200.0
"""The launches of a layer that attends by flashmla_sparse and not by the decode kernel. In a step
that waits for the host they count in full."""
DENSE_MHA_US = 300.0
"""The launches of a layer whose short extends take MHA, in full: six layers that waited for an
H200's host took 100 to 375 us more each, about 300 with a prefix or decodes."""
_COPY_US = 0.25e-3
"""What two copies take longer than one kernel for a head of one key: 0.22 ns on an H200 at 128
heads, 0.20 at 64, 0.18 at 16."""
_BYTES_A_US = 1e6
_MERGED = "mha/fa3_merged"
ABSORBED = "mla/fa3_paged"
"""vLLM's kernel for the decodes of dense MLA."""


@cache
def priced(
    dispatcher: Dispatcher, layers: int, workspace_tokens: int, *, leaving: bool = False
) -> Dispatcher:
    """`dispatcher`, with these costs in prefill's times, for `layers` layers that share a step.

    MHA expands at most `workspace_tokens` tokens at once. `leaving`: the tokens would go through
    the decode kernel by themselves. The costs of a dispatcher that has some already are replaced.
    """
    assert dispatcher.table is not None, "only a table steers"
    rows = dispatcher.table.measurements
    measured = any(row.arm == _MERGED and row.latency_us is not None for row in rows)
    setting = replace(
        dispatcher.setting,
        layers=layers,
        max_chunk_kv=min(dispatcher.setting.max_chunk_kv, workspace_tokens),
    )

    def pricing(row: Measurement, batch: Batch) -> Measurement | None:
        if row.arm == _MERGED:
            return row
        if row.arm.startswith("mha/"):
            if measured and batch.prefix_tokens:
                return None
            return slower(row, merge_us(batch, setting))
        if row.arm == "mla/flashmla_sparse" and setting.layout is KVLayout.FP8_PACKED:
            paid = replace(row, pass_us=(row.pass_us or 0.0) + SEQUENCE_US * batch.batch_size)
            more_us = gather_us(batch, setting) + (LEAVING_US if leaving else 0.0)
            return slower(paid, more_us)
        return row

    return with_costs(dispatcher, "prefill", setting, pricing, without=SGLANGS_TRITON)


@cache
def priced_dense(dispatcher: Dispatcher, layers: int) -> Dispatcher:
    """`dispatcher` with the kernels that vLLM has for dense MLA only: FlashAttention-3 over pages
    of the pool, and MHA: of prompts in one call, over prefixes of any length in chunks, merged.
    """
    setting = replace(dispatcher.setting, layers=layers, max_chunk_kv=maxsize)

    def pricing(row: Measurement, batch: Batch) -> Measurement | None:
        if row.arm == ABSORBED:
            return row
        # Under one name: the model of one call, fitted to prompts alone, answers for prefixes too.
        if row.arm != ("mha/sgl_fa3_merged" if batch.prefix_tokens else "mha/sgl_fa3"):
            return None
        copies_us = _COPY_US * batch.kv_tokens * setting.heads
        return slower(replace(row, arm="mha/sgl_fa3"), DENSE_MHA_US + copies_us)

    return with_costs(dispatcher, "dense_prefill", setting, pricing)


def merge_us(batch: Batch, setting: Setting) -> float:
    """What a layer's MHA over a prefix takes more than in one call."""
    if not batch.prefix_tokens:
        return 0.0
    # Both results are written and read in bf16, and one is written.
    return LAUNCH_US + batch.q_tokens * setting.heads * setting.profile.v * 2 * 5 / _BYTES_A_US


def gather_us(batch: Batch, setting: Setting) -> float:
    """What a layer takes more because the new tokens are read back with the context."""
    row_bytes = KVLayout.FP8_PACKED.token_bytes(setting.profile.rank, setting.profile.rope)
    read_back = LAUNCH_US / 2 if not batch.prefix_tokens else 0.0
    return read_back + batch.q_tokens * (row_bytes + 2 * setting.profile.latent) / _BYTES_A_US
