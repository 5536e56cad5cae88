"""How much longer `flashmla_sparse` takes in a layer than in a table where SGLang itself copies.

Tables read back as nsa-tune does: an H200 takes 59 us for 116,212 tokens, and 353 as SGLang does.
Their arms compute queries in place among zeros of 64 heads, which takes longer than to compute them
by themselves. SGLang writes the zeros and copies, 178 us each for 8192 queries of 16 heads, and
nsa-tune copies in 82 (PyTorch's profiler). Seven tenths of the difference are charged: so estimates
are equally far off, by 0.7 and 0.8 % on average, for an engine in which SGLang copies and one in
which nsa-tune does.
"""

from __future__ import annotations

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.sglang.eligible import PADDED_HEADS

_TOKEN_US = 0.0025
_ROW_US, _ROW_HEAD_US = 0.0153, 0.00051
"""0.023 us for 16 heads: zeros are written for all 64 heads, queries copied for those there are."""


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
