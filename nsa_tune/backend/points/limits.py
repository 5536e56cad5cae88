"""Limits that follow from what an answer means, how the engine runs it, or how an arm is built."""

from __future__ import annotations

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Guard, Setting

__all__ = [
    "CHUNK_CAPACITY",
    "DENSE_EXACT",
    "NOT_CAPTURED",
    "SELECTION_BYTES",
    "SOME_ROWS",
    "TRITON_SHAPE",
]


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


def _triton_shape(batch: Batch, setting: Setting) -> str | None:
    del batch
    widths = (setting.profile.rank, setting.profile.rope)
    if any(width < 16 or width & (width - 1) for width in widths):
        return f"the Triton kernel takes widths that are powers of two from 16, not {widths}"
    return None


def _selection_bytes(batch: Batch, setting: Setting) -> str | None:
    profile, memory = setting.profile, setting.device.memory
    needed = batch.q_tokens * profile.index_topk * 2 * profile.latent
    if memory and needed > memory // 4:
        return f"{needed / 2**30:.1f} GiB of gathered latents pass a quarter of the device's memory"
    return None


TRITON_SHAPE = Guard(
    "triton_shape", "formula", "backend/kernels/sparse_mla.py: one block spans a latent",
    _triton_shape,
)  # fmt: skip
SELECTION_BYTES = Guard(
    "selection_bytes", "formula", "points/decode: each row's selection is gathered",
    _selection_bytes,
)  # fmt: skip
