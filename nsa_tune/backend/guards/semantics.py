"""Limits that follow from what an answer means, or from how the engine runs it."""

from __future__ import annotations

from nsa_tune.backend.batch import Batch
from nsa_tune.backend.point import Guard, Setting

__all__ = ["CHUNK_CAPACITY", "DENSE_EXACT", "NOT_CAPTURED", "SOME_ROWS"]


def _dense_exact(batch: Batch, setting: Setting) -> str | None:
    topk = setting.profile.index_topk
    if batch.max_kv > topk:
        return f"dense attention equals sparse only up to {topk} kv tokens, {batch.max_kv} given"
    return None


def _chunk_capacity(batch: Batch, setting: Setting) -> str | None:
    if batch.kv_tokens > setting.max_chunk_kv:
        return f"{batch.kv_tokens} kv tokens pass the chunk capacity of {setting.max_chunk_kv}"
    return None


def _not_captured(batch: Batch, setting: Setting) -> str | None:
    del setting
    return "dense MHA plans on the host, which a CUDA graph cannot hold" if batch.captured else None


def _some_rows(batch: Batch, setting: Setting) -> str | None:
    # No constructor of Batch makes such a batch; an idle rank of data parallelism has one.
    del setting
    return None if batch.q_tokens > 0 else "a kernel cannot be launched without a query"


DENSE_EXACT = Guard(
    "dense_exact", "semantic", "the indexer selects index_topk tokens of at most as many",
    _dense_exact,
)  # fmt: skip
CHUNK_CAPACITY = Guard(
    "chunk_capacity", "formula", "SGLang 0.5.23 environ.py:724 SGLANG_MAX_KV_CHUNK_CAPACITY",
    _chunk_capacity,
)  # fmt: skip
NOT_CAPTURED = Guard("not_captured", "semantic", "SGLang 0.5.23 dsa_backend.py:4050", _not_captured)
SOME_ROWS = Guard("some_rows", "semantic", "CUDA refuses a grid of 0 blocks", _some_rows)
