"""How much longer SGLang's own copies around `flashmla_sparse` take than nsa-tune's, in a layer.

Tables read back as nsa-tune does. Their arms compute queries in place among zeros of 64 heads. With
the plug-in SGLang joins the queries' parts and nsa-tune copies them, which takes about as long.

On an H200 SGLang reads 116,212 tokens back in 353 us, nsa-tune in 59. For 8192 queries of 16 heads
SGLang writes zeros in 178 us and copies in 178, nsa-tune copies in 82 (`kernels_ms` of
`benchmarks.engine.run` with NSA_ENGINE_STEPS, with NSA_TUNE_COPIES=0 and without).
"""

from __future__ import annotations

from nsa_tune.backend.engines.sglang.copies.eligible import PADDED_HEADS
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout

__all__ = ["longer_us", "padding_us", "read_back_us"]

_TOKEN_US = 0.0025
_ROW_US, _ROW_HEAD_US = 0.0218, 0.00073
"""Zeros are written for all 64 heads, queries copied for those that there are."""


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
